"""Where the time goes: the longest chain of tasks, each started by the end of the one before."""

import numpy as np
from numpy.typing import NDArray

from stretto.sim.charge import CORES, INSIDE, LATENCY, LINK, THREAD, Charge
from stretto.sim.tasks import Ints, Run, Tasks

Words = NDArray[np.str_]


def longest_chain(tasks: Tasks, run: Run) -> Ints:
    """Return the tasks of a chain that ends last, in order, without a pause between them."""
    if not len(tasks):
        return np.empty(0, dtype=np.int64)
    at_once = run.end_s[tasks.earlier] == run.start_s[tasks.later]
    before = np.full(len(tasks), -1)
    before[tasks.later[at_once]] = tasks.earlier[at_once]
    chain, steps = [int(run.end_s.argmax())], before.tolist()
    while steps[chain[-1]] >= 0:
        chain.append(steps[chain[-1]])
    return np.array(chain[::-1], dtype=np.int64)


def spent(charge: Charge, run: Run) -> dict[str, float]:
    """Return the seconds of the longest chain by what held each of its tasks up.

    Work that a task would need alone counts for what limits it alone; what it lost to others, for
    the resource, of those it uses, that is busiest.
    """
    tasks = charge.tasks
    chain = longest_chain(tasks, run)
    result = dict.fromkeys((LATENCY, LINK, INSIDE, CORES, THREAD), 0.0)
    result[LATENCY] = float(tasks.delay_s[chain].sum())
    lost = run.end_s[chain] - run.start_s[chain] - tasks.delay_s[chain] - tasks.work_s[chain]
    alone = _limits(charge, chain)
    crowded = _crowds(charge, chain)
    for sort in (LINK, INSIDE, CORES, THREAD):
        mine = tasks.work_s[chain][alone == sort].sum() + lost[crowded == sort].sum()
        result[sort] = max(0.0, float(mine))
    return result


def _limits(charge: Charge, chain: Ints) -> Words:
    """Return what limits each task of ``chain`` alone: its transport, a thread, or a core."""
    message = charge.message_of(chain)
    sent = message >= 0
    limit = np.full(len(chain), CORES, dtype=object)
    limit[sent] = np.where(charge.between[message[sent]], LINK, INSIDE)
    limit[sent & (charge.tasks.load[chain, -1] >= 1)] = THREAD
    return limit.astype(np.str_)


def _crowds(charge: Charge, chain: Ints) -> Words:
    """Return the sort of the busiest resource that each task of ``chain`` uses."""
    tasks = charge.tasks
    busy = np.where(tasks.load[chain] > 0, tasks.busy_s[tasks.resource[chain]], -1.0)
    busiest = tasks.resource[chain, busy.argmax(axis=1)]
    sort = np.full(tasks.num_resources, "", dtype=object)
    for name, at in charge.sites.sorts.items():
        sort[at] = name
    words: Words = sort[busiest].astype(np.str_)
    return words
