"""Who goes how fast when resources are shared: max-min fairness by progressive filling."""

from collections.abc import Sequence

import numpy as np

from stretto.sim.tasks import Floats, Ints, summed

Uses = tuple[tuple[int, float], ...]
"""(resource, share of it at full speed), each resource once."""
_TIE = 1e-12


def fair_speeds(resource: Ints, load: Floats, count: Floats, num_resources: int) -> Floats:
    """Return the speed, at most one, of each kind of task that is working.

    ``resource[kind, use]`` and ``load[kind, use]`` say what a task of that kind takes at full
    speed, ``count`` how many of them there are. All speeds grow together until a resource is
    full; its tasks stay there, the others go on growing (Bertsekas and Gallager, Data Networks,
    1992, 6.5.2). A resource that no task of its own is kept from filling by another is full at
    its level whatever happens elsewhere, so all such are settled in one pass.
    """
    speed = np.ones(len(load))
    if load.size < num_resources:  # few tasks among many resources: forget the idle ones
        names, renamed = np.unique(resource, return_inverse=True)
        resource, num_resources = renamed.reshape(resource.shape), len(names)
    used = load * count[:, None]
    if summed(resource, used, num_resources).max(initial=0.0) <= 1 + _TIE:
        return speed
    free = np.ones(num_resources)
    left = np.arange(len(load))
    while left.size:
        at, takes = resource[left], load[left] > 0
        total = summed(at, used[left], num_resources)
        level = np.full(num_resources, np.inf)
        np.divide(free, total, out=level, where=total > 0)
        limit = np.where(takes, level[at], np.inf).min(axis=1).clip(max=1.0)
        lowest = np.full(num_resources, np.inf)
        held = np.where(takes, limit[:, None], np.inf)
        np.minimum.at(lowest, at.ravel(), held.ravel())
        full = level <= lowest * (1 + _TIE)
        settled = (limit >= 1) | (full[at] & takes).any(axis=1)
        speed[left[settled]] = limit[settled]
        free -= summed(at[settled], used[left[settled]] * limit[settled, None], num_resources)
        np.maximum(free, 0.0, out=free)
        left = left[~settled]
    return speed


def fair_speeds_of_few(uses: Sequence[Uses]) -> list[float]:
    """Return the same for single tasks, given by what each uses; faster for a few dozen."""
    speed = [1.0] * len(uses)
    wanted: dict[int, float] = {}
    users: dict[int, list[int]] = {}
    for task, used in enumerate(uses):
        for resource, load in used:
            wanted[resource] = wanted.get(resource, 0.0) + load
            users.setdefault(resource, []).append(task)
    free = {resource: 1.0 for resource, load in wanted.items() if load > 1 + _TIE}
    left = {resource: len(users[resource]) for resource in free}
    settled = [False] * len(uses)
    while free:
        level, tightest = min([(free[r] / wanted[r], r) for r in free])
        if level >= 1:
            break
        for task in users[tightest]:
            if settled[task]:
                continue
            settled[task], speed[task] = True, level
            for resource, load in uses[task]:
                if resource in free:
                    free[resource] -= load * level
                    wanted[resource] -= load
                    left[resource] -= 1
                    if not left[resource]:
                        del free[resource]
    return speed
