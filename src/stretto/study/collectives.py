"""How long collectives take here: ours by algorithm, the back end's own, and the bound."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from stretto.cluster.world import Mesh, World
from stretto.comm.algorithms.table import Choice, parse_word
from stretto.comm.codecs import parse_wire
from stretto.comm.connect import connect
from stretto.config.text import suggestion
from stretto.errors import ConfigError
from stretto.measure.collectives import COLLECTIVES, Trial, back_end, time_collective
from stretto.measure.ddp import Peers
from stretto.measure.interleave import Row, spread
from stretto.measure.wanted import Wanted
from stretto.sim.catalogue import price_all
from stretto.sim.choosing import LARGE, NATIVE, PARTS, choose_table, described
from stretto.sim.cluster import Cluster, load_cluster
from stretto.units import format_bytes, parse_bytes

HYBRID, ALL = "hybrid", "all"
"""Stand for whatever the table picks for a size, and for every algorithm there is."""


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody wants timed."""

    trials: tuple[Trial, ...]
    words: tuple[str, ...] = ()
    """``"ring/4"``, "hybrid", "all"; the likely ones when empty."""
    cluster: Cluster | None = None
    """What is known of the links; decides what is likely, and what "hybrid" stands for."""
    runs: int = 5


def request_of(wanted: Wanted, cluster: Path | None, world: World, runs: int) -> Request:
    """Return what is to be timed on the ranks of ``world``; mistakes are named before they meet.

    Raises:
        ConfigError: A size, an algorithm, a collective, a wire or a device that is not one.
    """
    if wanted.collective not in COLLECTIVES:
        known = suggestion(wanted.collective, list(COLLECTIVES), "known")
        raise ConfigError(f"no collective {wanted.collective!r}{known}")
    if wanted.device not in ("cpu", "cuda"):
        raise ConfigError(f"no device {wanted.device!r}; known: cpu (Gloo), cuda (NCCL)")
    parse_wire(wanted.wire)
    trials = tuple(
        Trial(wanted.collective, parse_bytes(size), wanted.wire, wanted.device)
        for size in wanted.sizes.split(",")
    )
    described_by = load_cluster(cluster) if cluster else None
    words = [word.strip() for word in wanted.algorithms.split(",") if word.strip()]
    for word in words:
        if word not in (HYBRID, ALL):
            parse_word(word, COLLECTIVES[wanted.collective].keys())
    return Request(trials, tuple(words), described_by, runs)


def bench_collectives(world: World, request: Request, say: Callable[[str], None]) -> list[Row]:
    """Time every trial, its algorithms and the back end interleaved; all ranks together."""
    torch.set_num_threads(world.threads)
    device = request.trials[0].device
    channel = connect(world, device=device)
    rows: list[Row] = []
    with Peers(world, device):
        for trial in request.trials:
            words = words_for(trial, request, world, channel.mesh)
            say(f"{_name(trial)}: {', '.join(words)}")
            times = time_collective(
                trial, words, channel, runs=request.runs, peer=back_end(trial, channel.size)
            )
            rows += _rows(trial, times, world, channel.mesh)
    channel.close()
    return rows


def words_for(trial: Trial, request: Request, world: World, mesh: Mesh) -> dict[str, str]:
    """Return what is timed for ``trial``: names, and the algorithms they stand for."""
    cluster = request.cluster or described(mesh, world.link_bits_per_s)
    words = list(request.words)
    if ALL in words or not words:
        named = [word for word in words if word != ALL]
        words = [*named, *candidates(trial, cluster.with_mesh(mesh), every=bool(words))]
    meant = {word: word for word in words}
    if HYBRID in words:
        meant[HYBRID] = choose_table(cluster, mesh).pick(trial.num_bytes).word
    return meant


def candidates(trial: Trial, cluster: Cluster, *, every: bool = False, most: int = 5) -> list[str]:
    """Return the algorithms that the price list puts first; or all, each as it is best."""
    known = COLLECTIVES[trial.collective]
    parts = PARTS if trial.num_bytes >= LARGE[0] else (1,)
    rows = price_all(cluster, [trial.num_bytes], parts, known).at(trial.num_bytes)
    best: dict[str, str] = {}
    for row in rows:
        best.setdefault(row.name, Choice(0, row.name, row.parts).word)
    if every:
        return sorted({*best.values(), *best})
    own = [NATIVE] if NATIVE in known else []
    return [*dict.fromkeys([*list(best.values())[:most], *own])]


def bound_s(trial: Trial, world: World, mesh: Mesh) -> float | None:
    """Return the bytes every host's link must carry over its rate, where the rate is known."""
    if world.link_bits_per_s is None or mesh.hosts == 1:
        return None
    share = (mesh.hosts - 1) / mesh.hosts
    times = {"allreduce": 2 * share, "broadcast": 1.0}.get(trial.collective, share)
    narrow = parse_wire(trial.wire).dtype or torch.float32
    num_bytes = trial.num_bytes * narrow.itemsize / torch.float32.itemsize
    return times * num_bytes * 8 / world.link_bits_per_s


def _name(trial: Trial) -> str:
    wire = "" if trial.wire == "own" else f" as {trial.wire}"
    return f"{trial.collective} {format_bytes(trial.num_bytes)}{wire}"


def _rows(trial: Trial, times: dict[str, list[float]], world: World, mesh: Mesh) -> list[Row]:
    peer = "nccl" if trial.device == "cuda" else "gloo"
    peer_s = statistics.median(times["peer"])
    bound = bound_s(trial, world, mesh)
    return [
        Row(
            f"{_name(trial)}, {mesh.shape}, {word}",
            statistics.median(values),
            peer,
            peer_s,
            bound,
            len(values),
            spread(values),
        )
        for word, values in times.items()
        if word != "peer"
    ]
