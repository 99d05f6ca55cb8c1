"""How long collectives take here: ours by algorithm, the back end's own, and the bound."""

import statistics
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from stretto.cluster.world import Mesh, World
from stretto.comm.algorithms import Algorithm
from stretto.comm.algorithms.table import parse_word
from stretto.comm.codecs import parse_wire
from stretto.comm.connect import connect
from stretto.config.text import suggestion
from stretto.errors import ConfigError, ScheduleError
from stretto.measure.collectives import COLLECTIVES, Trial, back_end, time_collective
from stretto.measure.ddp import Peers
from stretto.measure.interleave import Row, spread
from stretto.measure.wanted import Wanted
from stretto.sim.book import Row as Priced
from stretto.sim.catalogue import price_all
from stretto.sim.choosing import LARGE, NATIVE, PARTS, choose_table, described
from stretto.sim.cluster import Cluster, load_cluster
from stretto.units import format_bytes, parse_bytes

HYBRID, ALL, LIKELY = "hybrid", "all", "likely"
"""Stand for what the table picks for a size, every algorithm there is, and those priced best."""


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody wants timed."""

    trials: tuple[Trial, ...]
    words: tuple[str, ...] = ()
    """``"ring/4"``, "hybrid", "all", "likely", also when empty."""
    cluster: Cluster | None = None
    """What is known of the links; decides what is likely, and what "hybrid" stands for."""
    runs: int = 5


def request_of(wanted: Wanted, cluster: Path | None, runs: int) -> Request:
    """Return what is to be timed; mistakes are named before the ranks meet.

    Raises:
        ConfigError: A size, an algorithm, a collective, a wire or a device that is not one.
    """
    if wanted.collective not in COLLECTIVES:
        known = suggestion(wanted.collective, list(COLLECTIVES), "known")
        raise ConfigError(f"no collective {wanted.collective!r}{known}")
    _check_device(wanted.device)
    trials = tuple(
        Trial(wanted.collective, parse_bytes(size), wanted.wire, wanted.device)
        for size in wanted.sizes.split(",")
    )
    described_by = load_cluster(cluster) if cluster else None
    words = [word.strip() for word in wanted.algorithms.split(",") if word.strip()]
    able = _able(trials[0])
    for word in words:
        _check_word(word, trials[0], able)
    return Request(trials, tuple(words), described_by, runs)


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"no device {device!r}; known: cpu (Gloo), cuda (NCCL)")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no GPU here; take cpu, or a machine with one")


def _check_word(word: str, trial: Trial, able: Collection[str]) -> None:
    if word == HYBRID and trial.collective != "allreduce":
        raise ConfigError(
            f"{HYBRID} stands for a table of all-reduce algorithms, there is none for "
            f"{trial.collective}: name one of {', '.join(COLLECTIVES[trial.collective])}"
        )
    if word in (HYBRID, ALL, LIKELY):
        return
    name, _ = parse_word(word, COLLECTIVES[trial.collective].keys())
    if name not in able:
        raise ConfigError(
            f"--wire {trial.wire} is summed hop by hop, which the back end's own all-reduce "
            f"cannot do: take {word} out of --algorithms"
        )


def _able(trial: Trial) -> dict[str, Algorithm]:
    """Return the algorithms that can carry it; the back end's own sums plain types only."""
    wire = parse_wire(trial.wire)
    if wire.share is not None:
        raise ConfigError(
            f"wire {trial.wire!r} is no collective: it is timed by `stretto bench step "
            f"strategy.wire='{trial.wire}'`"
        )
    known = COLLECTIVES[trial.collective]
    return {name: known[name] for name in known if wire.codec is None or name != NATIVE}


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
    words = list(request.words or [LIKELY])
    if ALL in words or LIKELY in words:
        named = [word for word in words if word not in (ALL, LIKELY)]
        words = [*named, *candidates(trial, cluster.with_mesh(mesh), every=ALL in words)]
    meant = {word: word for word in words}
    if HYBRID in words:
        # Nobody has described a GPU's links: the back end knows them.
        unknown = request.cluster is None and trial.device == "cuda"
        where = (None, Mesh((1,))) if unknown else (cluster, mesh)
        table = choose_table(*where, native=NATIVE in _able(trial))
        meant[HYBRID] = table.pick(trial.num_bytes).word
    return meant


def candidates(trial: Trial, cluster: Cluster, *, every: bool = False, most: int = 5) -> list[str]:
    """Return the algorithms that the price list puts first; or all, each as it is best."""
    known = {n: make for n, make in _able(trial).items() if _fits(make, cluster.mesh)}
    parts = PARTS if trial.num_bytes >= LARGE[0] else (1,)
    rows = price_all(cluster, [trial.num_bytes], parts, known).at(trial.num_bytes)
    best: dict[str, Priced] = {}
    for row in rows:
        best.setdefault(row.name, row)
    if every:
        return sorted({*best, *(row.word for row in best.values())})
    own = [NATIVE] if NATIVE in known else []
    first = _without_twins(best.values())[:most]
    return [*dict.fromkeys([*(row.word for row in first), *own])]


def _without_twins(rows: Iterable[Priced]) -> list[Priced]:
    """Drop what does the same as one before it: on some shapes algorithms coincide."""
    kept: dict[tuple[object, ...], Priced] = {}
    for row in rows:
        ends = (row.schedule.program(0), row.schedule.program(row.schedule.size - 1))
        kept.setdefault((row.name == NATIVE, row.schedule.num_chunks, *ends), row)
    return list(kept.values())


def _fits(algorithm: Algorithm, mesh: Mesh) -> bool:
    """Return whether there is a schedule: some algorithms want hosts of equal size."""
    try:
        algorithm(mesh, 1)
    except ScheduleError:
        return False
    return True


def bound_s(trial: Trial, world: World, mesh: Mesh) -> float | None:
    """Return the bytes every host's link must carry over its rate, where the rate is known."""
    if world.link_bits_per_s is None or mesh.hosts == 1:
        return None
    share = (mesh.hosts - 1) / mesh.hosts
    times = {"allreduce": 2 * share, "broadcast": 1.0}.get(trial.collective, share)
    return times * _travelling(trial) * 8 / world.link_bits_per_s


def _travelling(trial: Trial) -> float:
    """Return the bytes of the whole tensor as it travels."""
    wire = parse_wire(trial.wire)
    elements = trial.num_bytes / torch.float32.itemsize
    if wire.codec is not None:
        return wire.codec.num_bytes([round(elements)])
    return elements * (wire.dtype or torch.float32).itemsize


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
