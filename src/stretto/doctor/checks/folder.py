"""Where the run writes: may it, and is there room?"""

from stretto.doctor.checks.problems import Problem, finding, per_rank
from stretto.doctor.records import Examination, Facts, Finding
from stretto.units import format_bytes, parse_bytes

LEAST_INODES = 1000
TRACE_BYTES = parse_bytes("64MB")
"""Room for the time-line and the log of a rank; rank 0 alone writes checkpoints."""


def disk(seen: Examination) -> Finding:
    """Hold the free room against what the run needs there."""

    def look(facts: Facts) -> Problem | None:
        rank, folder = facts.place.card.rank, facts.folder
        need_bytes, need = _need(seen, rank)
        advice = "delete old runs or choose another disk with run.folder=..."
        if folder.is_full or folder.free_bytes < need_bytes:
            free = format_bytes(folder.free_bytes)
            text = f"{free} free in {folder.path}, and {need} may need {format_bytes(need_bytes)}"
            return Problem(rank, text, advice)
        if folder.free_inodes is not None and folder.free_inodes < LEAST_INODES:
            text = f"{folder.free_inodes} inodes free in {folder.path}, however much room there is"
            return Problem(rank, text, advice)
        return None

    own = seen.own.folder
    need_bytes, need = _need(seen, seen.speaker)
    fine = (
        f"{format_bytes(own.free_bytes)} free in {own.path}, {need} may need "
        f"{format_bytes(need_bytes)}"
    )
    return finding("disk", seen, per_rank(seen, look), fine)


def folder(seen: Examination) -> Finding:
    """Tell where a file could not be made."""

    def look(facts: Facts) -> Problem | None:
        tried = facts.folder
        if not tried.error or tried.is_full:
            return None
        text = f"cannot write in {tried.path}: {tried.error.lower()}"
        advice = "mount it writable, correct its owner, or choose another with run.folder=..."
        return Problem(facts.place.card.rank, text, advice)

    fine = f"a file could be made and removed in {seen.own.folder.path}"
    return finding("folder", seen, per_rank(seen, look), fine)


def _need(seen: Examination, rank: int) -> tuple[int, str]:
    if rank == 0:
        return seen.purpose.need_bytes, seen.purpose.need
    return TRACE_BYTES, "time-lines and logs"
