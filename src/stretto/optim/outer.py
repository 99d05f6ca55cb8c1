"""Outer rules: where workers begin again, once they know how far a round of local steps led them.

A round begins at ``starts``. When it ends, ``moved`` is starts less the mean of what the peers have
come to, be they all workers or a pair: it has the sign of a gradient, and is called a
pseudo-gradient. Every rule overwrites ``starts`` with the point where the next round begins.

Like update rules (`stretto.optim.rules`) they are functions on lists of tensors, in place: a rank
passes its layers, virtual workers theirs stacked as [W, ...].
"""

import torch

from stretto.optim.rules import Momentum, Tensors, momentum_step_


def average_(starts: Tensors, moved: Tensors) -> None:
    """Begin again at the mean: x = x_start - moved.

    Local SGD, and post-local SGD from its turning point on (Lin et al., 2018, arXiv:1808.07217).
    """
    torch._foreach_sub_(starts, moved)


def slowmo_(
    starts: Tensors, momenta: Tensors, moved: Tensors, *, lr: float, alpha: float, beta: float
) -> None:
    """Remember rounds in units of the rate: u = beta u + moved / lr, x = x_start - alpha lr u.

    SlowMo (Wang et al., 2019, arXiv:1910.00643). ``lr`` is the rate of the local steps. Where it is
    0 nothing is divided by it: u only fades, and x moves by alpha times moved.
    """
    torch._foreach_mul_(momenta, beta)
    if not lr:
        torch._foreach_add_(starts, moved, alpha=-alpha)
        return
    torch._foreach_add_(momenta, moved, alpha=1 / lr)
    torch._foreach_add_(starts, momenta, alpha=-alpha * lr)


def nesterov_(
    starts: Tensors, momenta: Tensors, moved: Tensors, *, lr: float, momentum: float
) -> None:
    """Step by Nesterov's rule: m = momentum m + moved, x = x_start - lr (moved + momentum m).

    DiLoCo (Douillard et al., 2023, arXiv:2311.08105). ``lr`` is the outer rate.
    """
    how = Momentum(momentum, nesterov=momentum > 0)
    momentum_step_(starts, momenta, moved, lr, how)


def noloco_(
    starts: Tensors, momenta: Tensors, moved: Tensors, *, lr: float, momentum: float
) -> None:
    """Follow a pair's mean, which is nobody else's: m = momentum m - lr moved, x = x_start + m.

    NoLoCo (Kolehmainen et al., 2025, arXiv:2506.10911): m = momentum m + lr D + lr (M - x_start),
    D being the pair's mean of x - x_start and M that of x_start, which differs from worker to
    worker. D + M is the pair's mean of x: no more than x need travel.
    """
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, moved, alpha=-lr)
    torch._foreach_add_(starts, momenta)
