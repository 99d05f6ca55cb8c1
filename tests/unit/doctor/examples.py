"""A healthy world of made-up ranks, and how to spoil it."""

from dataclasses import replace

from stretto.cluster.rendezvous import RankInfo
from stretto.doctor.records import (
    ClockOffset,
    Code,
    Examination,
    Facts,
    Folder,
    Machine,
    Network,
    ProbeReport,
    ProbeResult,
    RankIdentity,
    RunRequirements,
)

GB = 10**9
PURPOSE = RunRequirements("runs/run", GB, "3 checkpoints", heartbeat_timeout_s=30, timeout_s=300)


def facts_of(rank, size, ranks_per_host=1):
    host = rank // ranks_per_host
    rank_info = RankInfo(rank, size, f"n{host}", "torchrun", "job")
    address = f"198.18.0.{10 + host}"
    local = rank % ranks_per_host
    return Facts(
        identity=RankIdentity(
            rank_info, f"n{host}", f"kernel-{host}", 100 + rank, "torchrun: RANK", "n0:29500"
        ),
        machine=Machine((local,), 1, 16 * GB, (), GB, 4096, 4096),
        code=Code({"torch": "2.13"}, {"run.py": "aa", "units.py": "bb"}, ("gloo",), ""),
        network=Network("", ("eth0", "lo"), False, "", "eth0", address, 32768, 60999, 10),
        folder=Folder("runs/run", 40 * GB, 10**6),
    )


def healthy(size=3, ranks_per_host=1):
    facts = {rank: facts_of(rank, size, ranks_per_host) for rank in range(size)}
    probe_reports = {
        rank: ProbeReport(
            tuple(ProbeResult(peer, f"a{peer}:1") for peer in range(size) if peer != rank),
            ClockOffset(0.001, 0.001) if rank else None,
        )
        for rank in range(size)
    }
    return Examination(PURPOSE, size, 0, facts, probe_reports, tuple(range(size)))


def spoil(seen, rank, part, **changes):
    """Return ``seen`` with some facts of one rank changed: ``part`` is a field of `Facts`."""
    facts = seen.facts[rank]
    changed = replace(facts, **{part: replace(getattr(facts, part), **changes)})
    return replace(seen, facts={**seen.facts, rank: changed})
