"""Prices of what sums over all ranks: gradients in every step, or models now and then."""

from functools import lru_cache

import torch

from stretto.cluster.world import Mesh
from stretto.comm.algorithms.table import AlgorithmTable, parse_table
from stretto.comm.buckets import WIRE, order_of_backward
from stretto.comm.codecs import parse_wire
from stretto.errors import ConfigError
from stretto.sim.choosing import ASSUMED, choose_alone, choose_table
from stretto.sim.presets import preset
from stretto.sim.steps import (
    Exchange,
    Rhythm,
    StepPrice,
    of_topology,
    price_sums,
    price_talks,
)
from stretto.strategy import AllReduceConfig, NoLoCoConfig, PostLocalConfig
from stretto.strategy.allreduce import AUTO, bucket_cuts, tuned
from stretto.strategy.local.config import AveragedConfig, LocalConfig
from stretto.strategy.local.fragment import cut_fragments
from stretto.strategy.local.travel import room_for
from stretto.study.predicted.setting import Setting

FEW = 64
"""Ranks up to which algorithms are chosen as the run itself would; with more, each sum by itself:
to follow rows of sums takes minutes."""
_SIZES = (250_000, 4_000_000)
"""Of sums, for which they are then chosen."""
_remembered = lru_cache(maxsize=16)


def price_allreduce(setting: Setting) -> StepPrice:
    """Return the price of a step whose buckets are summed while backward goes on.

    Buckets leave as their gradients come, one after another, and each is waited for before its
    update, beside which the next ones still travel.

    Raises:
        ConfigError: What travels depends on the gradients.
    """
    strategy, line, model = setting.strategy, setting.line, setting.known.model
    assert isinstance(strategy, AllReduceConfig)
    wire = parse_wire(strategy.wire)
    if wire.share is not None:
        raise ConfigError(
            f'strategy.wire = "{strategy.wire}": what travels depends on the gradients, and has no '
            "price before they are there"
        )
    chosen, table = _chosen(strategy, setting)
    named = order_of_backward(model)
    total = sum(p.numel() for _, p in named)
    exchanges: list[Exchange] = []
    ready_s, done = 0.0, 0
    for count in bucket_cuts(chosen, model):
        bucket, named = named[:count], named[count:]
        ready_s = max(ready_s, line.ready(name for name, _ in bucket))
        updated_s = 0.0 if setting.reads_gradients else line.update_s * done / total
        numels = [p.numel() for _, p in bucket]
        dtype = wire.dtype or bucket[0][1].dtype
        marks = len(bucket) * dtype.itemsize
        body = wire.codec.num_bytes(numels) if wire.codec else sum(numels) * dtype.itemsize
        exchanges.append(Exchange(body + marks, ready_s, line.backward_s + updated_s))
        done += sum(numels)
    rhythm = Rhythm(line.step_s, tuple(exchanges), slowdown=line.slowdown)
    return price_sums(rhythm, table, setting.cluster)


def price_averaged(setting: Setting) -> StepPrice:
    """Return the price of a step, in the mean over those from one round to the next.

    A round leaves after an update, and so many steps later nobody goes on without it.
    """
    strategy, mesh = setting.strategy, setting.cluster.mesh
    assert isinstance(strategy, AveragedConfig)
    rhythm = _rounds(setting, strategy, WIRE[strategy.wire])
    on_gpu = setting.subject.source.on_gpu
    if strategy.algorithm != AUTO or on_gpu:
        table = strategy.table(mesh, on_gpu=on_gpu)
    else:
        table = _usual_table(mesh)
    return price_sums(rhythm, table, setting.cluster)


def price_pairs(setting: Setting) -> StepPrice:
    """Return the same where ranks meet in pairs, and wait for each other at once."""
    strategy = setting.strategy
    assert isinstance(strategy, NoLoCoConfig)
    talk = of_topology(strategy.who(), setting.cluster.mesh.size)
    return price_talks(_rounds(setting, strategy, None), talk, setting.cluster)


def _rounds(setting: Setting, strategy: LocalConfig, wire: torch.dtype | None) -> Rhythm:
    """Return the steps of a period; of post_local those that come after its first part."""
    line, delay = setting.line, strategy.streaming().delay
    cut = cut_fragments(setting.known.model, strategy.streaming().fragments)
    every = strategy.every
    # Turns follow from the step: a first part, if there is one, is over after so many periods.
    before = strategy.from_step if isinstance(strategy, PostLocalConfig) else 0
    first = every * -(-before // every)
    exchanges = []
    for step in range(every):
        turn = strategy.turn(first + step)
        leaves_s = step * line.step_s + line.forward_at_s
        for part, named in cut:
            if part == turn:
                num_bytes = room_for([p for _, p in named], wire).nbytes
                due_s = leaves_s + delay * line.step_s
                exchanges.append(Exchange(num_bytes, leaves_s, due_s, number=part))
    return Rhythm(every * line.step_s, tuple(exchanges), every, line.slowdown)


def _chosen(strategy: AllReduceConfig, setting: Setting) -> tuple[AllReduceConfig, AlgorithmTable]:
    """Return the settings with what they leave open, as the run chooses it, or nearly so."""
    mesh, model = setting.cluster.mesh, setting.known.model
    known = strategy.description()
    unknown = known is None and (setting.subject.source.on_gpu or mesh.hosts == 1)
    if strategy.algorithm == AUTO and (unknown or mesh.size > FEW):
        native = parse_wire(strategy.wire).codec is None
        if unknown:
            table = choose_table(None, Mesh((1,)), native=native)
        elif known is None:
            table = _assumed_table(mesh, native)
        else:
            table = choose_alone(known.with_mesh(mesh), _SIZES, native=native)
        strategy = strategy.model_copy(update={"algorithm": str(table)})
    chosen = tuned(strategy, mesh, model)
    return chosen, parse_table(chosen.algorithm)


@_remembered
def _usual_table(mesh: Mesh) -> AlgorithmTable:
    """Return what local updates are carried by where nobody says, or nearly so."""
    if mesh.size <= FEW or mesh.hosts == 1:
        return choose_table(None, mesh)
    return _assumed_table(mesh, native=True)


@_remembered
def _assumed_table(mesh: Mesh, native: bool) -> AlgorithmTable:
    return choose_alone(preset(ASSUMED).with_mesh(mesh), _SIZES, native=native)
