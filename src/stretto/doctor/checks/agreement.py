"""What ranks must have in common: code, launcher, mesh, clock; and time-outs in their order."""

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

from stretto.cluster.beats import BEAT_S, NAMED_AFTER_S
from stretto.cluster.meet import settle_mesh
from stretto.doctor.checks.problems import Problem, each, finding, per_rank
from stretto.doctor.records import Clock, Code, Examination, Facts, Finding
from stretto.errors import LaunchError
from stretto.units import format_s

CLOCK_WARNS_S = 2.0
CLOCK_FAILS_S = 30.0
SHORT_KILL_WAIT_S = 30.0
"""Slurm's own default between TERM and KILL; a run must save within it."""


def code(seen: Examination) -> Finding:
    """Name ranks that run other code than most, and what differs."""
    counts = Counter(_key(facts.code) for facts in seen.facts.values())
    # The first among equals is that of the lowest rank.
    common = counts.most_common(1)[0][0]
    usual = next(f.code for f in seen.facts.values() if _key(f.code) == common)
    advice = "install the same stretto and the same packages on every host, or share one folder"
    unclear = [
        Problem(rank, "tells its facts in a form this version cannot read: other code", advice)
        for rank in seen.came
        if rank not in seen.facts
    ]

    def look(facts: Facts) -> Problem | None:
        if _key(facts.code) == common:
            return None
        text = f"other code than most: {differences(facts.code, usual)}"
        return Problem(facts.place.card.rank, text, advice)

    versions = ", ".join(f"{name} {number}" for name, number in usual.versions.items())
    fine = f"the same {len(usual.files)} files of stretto everywhere, {versions}"
    return finding("code", seen, [*per_rank(seen, look), *unclear], fine)


def differences(mine: Code, usual: Code) -> str:
    """Say what differs between two ranks' code, most telling first, at most four things."""
    versions = [
        f"{name} {mine.versions.get(name)}" for name in _unlike(mine.versions, usual.versions)
    ]
    files = _unlike(mine.files, usual.files)
    told = [*versions, *files]
    more = f" and {len(told) - 4} more" if len(told) > 4 else ""
    return ", ".join(told[:4]) + more


def _unlike(mine: Mapping[str, str], usual: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*mine, *usual} if mine.get(name) != usual.get(name))


def _key(code: Code) -> tuple[tuple[tuple[str, str], ...], ...]:
    return tuple(sorted(code.versions.items())), tuple(sorted(code.files.items()))


def launcher(seen: Examination) -> Finding:
    """Tell which launcher was found, and by which words."""
    return Finding("launcher", "ok", (), each(f.place.why for f in seen.facts.values()))


def mesh(seen: Examination) -> Finding:
    """Let the ranks' own numbers add up to one mesh of hosts."""
    advice = "start all ranks with one command of one launcher, host after host"
    doubles = [
        Problem(rank, f"claimed by a second process ({where})", "give each process its own rank")
        for rank, where in seen.doubles.items()
    ]
    cards = [seen.facts[rank].place.card for rank in sorted(seen.facts)]
    try:
        counts = settle_mesh(cards).ranks_per_host
    except LaunchError as wrong:
        return Finding("mesh", "FAIL", (), str(wrong), advice)
    problems = [*doubles, *per_rank(seen, lambda facts: _same_machine(seen, facts))]
    shape = f"{len(counts)} x {counts[0]}" if len(set(counts)) == 1 else "+".join(map(str, counts))
    hosts = each(facts.place.host for facts in seen.facts.values())
    return finding("mesh", seen, problems, f"hosts x ranks: {shape} ({hosts})")


def _same_machine(seen: Examination, facts: Facts) -> Problem | None:
    """Warn where two hosts are one machine, unless that is the point, as in a lab."""
    place = facts.place
    twins = [
        other.place.host
        for other in seen.facts.values()
        if other.place.machine_id == place.machine_id
        and other.place.card.host_name != place.card.host_name
    ]
    if not twins or place.card.launcher == "stretto lab":
        return None
    text = f"the launcher takes it for another host than {each(twins)}, and they are one machine"
    advice = "let the launcher count the machine once, or its cores and GPUs are given out twice"
    return Problem(place.card.rank, text, advice, "warn")


def clock(seen: Examination) -> Finding:
    """Hold every wall clock against the speaker's."""
    others = {rank: told for rank, told in sorted(seen.rounds.items()) if rank != seen.speaker}
    judged = [_wrong_clock(rank, told.clock, seen.speaker) for rank, told in others.items()]
    at_most_s = [
        abs(told.clock.ahead_s) + told.clock.uncertainty_s
        for told in others.values()
        if told.clock is not None
    ]
    fine = (
        f"within {format_s(max(at_most_s))} of rank {seen.speaker}'s" if at_most_s else "one only"
    )
    return finding("clock", seen, [problem for problem in judged if problem], fine)


def _wrong_clock(rank: int, measured: Clock | None, speaker: int) -> Problem | None:
    if measured is None:
        return Problem(rank, "its clock could not be read", "run the doctor once more", "warn")
    off_s = _off_s(measured)
    if off_s <= CLOCK_WARNS_S:
        return None
    side = "ahead of" if measured.ahead_s > 0 else "behind"
    text = f"its clock is {format_s(off_s)} {side} that of rank {speaker}"
    advice = "set clocks by NTP (`timedatectl set-ntp true`): times in logs and requeues lie"
    return Problem(rank, text, advice, "FAIL" if off_s > CLOCK_FAILS_S else "warn")


def _off_s(measured: Clock) -> float:
    """Return by how much a clock is wrong at least."""
    return max(0.0, abs(measured.ahead_s) - measured.uncertainty_s)


def time_outs(seen: Examination) -> Finding:
    """Hold each time-out against the one that must come before it."""
    ladder = {
        "beat every": BEAT_S,
        "named after": NAMED_AFTER_S,
        "given up after run.silence_s": seen.purpose.silence_s,
        "collective ends after run.timeout_s": seen.purpose.timeout_s,
    }
    line = " < ".join(f"{name} {format_s(value)}" for name, value in ladder.items())
    for (lower, low_s), (upper, high_s) in pairwise(ladder.items()):
        if high_s <= low_s:
            found = f"{upper} {format_s(high_s)} is not above {lower} {format_s(low_s)}"
            raised = upper.split()[-1]
            return Finding("time-outs", "FAIL", (), found, f"raise {raised} above {low_s:g}")
    kill_wait_s = seen.own.machine.kill_wait_s
    if kill_wait_s is None:
        return Finding("time-outs", "ok", (), line)
    line += f"; Slurm leaves {format_s(kill_wait_s)} between TERM and KILL"
    if kill_wait_s >= SHORT_KILL_WAIT_S:
        return Finding("time-outs", "ok", (), line)
    advice = "have Slurm warn earlier (sbatch --signal=USR1@120), so that a checkpoint gets done"
    return Finding("time-outs", "warn", (), line, advice)
