"""Loss and accuracy of each sample by itself: who averages over what is the caller's decision.

Samples of a step are spread unevenly over ranks, so a mean per rank would weigh them unequally.

Shape suffixes: B batch, T tokens, V classes or vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def per_sample_loss(outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the cross entropy of each sample, [B].

    ``outputs`` are logits [B, V] with targets [B], or [B, T, V] with targets [B, T], of which
    the mean over T is taken. Logits of 16 bits are widened first: their sums of exponentials
    would lose the loss's last digits.

    ``smoothing`` takes this share of the target away from the right class and spreads it evenly
    over all V, the right one included. Who writes of a mass eps on the V - 1 wrong classes alone
    means ``smoothing = eps * V / (V - 1)``.
    """
    if outputs.dtype in (torch.bfloat16, torch.float16):
        outputs = outputs.float()
    losses = cross_entropy(
        outputs.flatten(0, -2), targets.flatten(), reduction="none", label_smoothing=smoothing
    )
    return _mean_per_sample(losses.view(targets.shape))


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of right answers in each sample, [B]: 0 or 1 unless it has tokens."""
    return _mean_per_sample((outputs.argmax(dim=-1) == targets).float())


def _mean_per_sample(values: Tensor) -> Tensor:
    return values if values.dim() == 1 else values.flatten(1).mean(dim=1)
