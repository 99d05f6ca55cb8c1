"""Checks of single machines: disk, hardware, limits, threads; and how checks report problems."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stretto.doctor.records import Examination, Facts, Finding, Status
from stretto.telemetry.event_text import ranks_text
from stretto.units import format_bytes, parse_bytes

MAX_PROBLEMS_SHOWN = 3
"""Problems shown in a finding; the rest is counted."""


@dataclass(frozen=True, slots=True)
class RankProblem:
    """A problem of one rank, and advice."""

    rank: int
    text: str
    advice: str
    status: Status = "FAIL"


def make_finding(
    check: str, examination: Examination, problems: Sequence[RankProblem], ok_text: str
) -> Finding:
    """Return the finding of a check: ``ok_text`` without problems, otherwise the problems.

    A problem of several ranks is shown once. Failures come before warnings.
    """
    if not problems:
        return Finding(check, "ok", (), ok_text)
    groups: dict[tuple[bool, str, str], list[int]] = {}
    for problem in problems:
        key = (problem.status != "FAIL", problem.text, problem.advice)
        groups.setdefault(key, []).append(problem.rank)
    # A stable sort keeps the order of discovery within a status.
    ordered = sorted(groups, key=lambda key: key[0])
    shown = [
        f"{_describe_ranks(examination, groups[key])}: {key[1]}"
        for key in ordered[:MAX_PROBLEMS_SHOWN]
    ]
    more = (
        [f"and {len(ordered) - MAX_PROBLEMS_SHOWN} more"]
        if len(ordered) > MAX_PROBLEMS_SHOWN
        else []
    )
    return Finding(
        check=check,
        status="warn" if ordered[0][0] else "FAIL",
        ranks=tuple(sorted({rank for ranks in groups.values() for rank in ranks})),
        finding="; ".join([*shown, *more]),
        advice="; ".join(
            dict.fromkeys(advice for _, _, advice in ordered[:MAX_PROBLEMS_SHOWN] if advice)
        ),
    )


def find_rank_problems(
    examination: Examination, find_problem: Callable[[Facts], RankProblem | None]
) -> list[RankProblem]:
    """Return the problems that ``find_problem`` finds in each rank's own facts."""
    return [
        problem
        for facts in examination.facts.values()
        if (problem := find_problem(facts)) is not None
    ]


def join_distinct(values: Iterable[str]) -> str:
    """Return the different values among ``values``, in order."""
    return ", ".join(dict.fromkeys(values))


def _describe_ranks(examination: Examination, ranks: Sequence[int]) -> str:
    """Return ``rank 2 (host n2, 198.18.0.3)``; host and address only if all ranks share them."""
    facts_of_ranks = [examination.facts[rank] for rank in ranks if rank in examination.facts]
    hosts = {facts.identity.host for facts in facts_of_ranks}
    addresses = (
        {facts.network.address for facts in facts_of_ranks} if examination.size > 1 else set()
    )
    where = [f"host {host}" for host in hosts if len(hosts) == 1]
    where += [address for address in addresses if len(addresses) == 1 and address]
    return f"{ranks_text(ranks)} ({', '.join(where)})" if where else ranks_text(ranks)


MIN_FREE_INODES = 1000
BYTES_PER_RANK_LOGS = parse_bytes("64MB")
"""Space for the timeline and the log of a rank; only rank 0 writes checkpoints."""


def check_disk_space(examination: Examination) -> Finding:
    """Compare the free disk space with what the run needs."""

    def find_problem(facts: Facts) -> RankProblem | None:
        rank, folder = facts.identity.rank_info.rank, facts.folder
        required_bytes, required_for = _required_space(examination, rank)
        advice = "delete old runs or choose another disk with run.folder=..."
        if folder.is_full or folder.free_bytes < required_bytes:
            free = format_bytes(folder.free_bytes)
            needed = format_bytes(required_bytes)
            text = f"{free} free in {folder.path}, and {required_for} may need {needed}"
            return RankProblem(rank, text, advice)
        if folder.free_inodes is not None and folder.free_inodes < MIN_FREE_INODES:
            text = f"{folder.free_inodes} inodes free in {folder.path}, however much space there is"
            return RankProblem(rank, text, advice)
        return None

    coordinator_facts = examination.coordinator_facts.folder
    required_bytes, required_for = _required_space(examination, examination.coordinator)
    ok_text = (
        f"{format_bytes(coordinator_facts.free_bytes)} free in {coordinator_facts.path}, "
        f"{required_for} may need {format_bytes(required_bytes)}"
    )
    return make_finding("disk", examination, find_rank_problems(examination, find_problem), ok_text)


def check_folder(examination: Examination) -> Finding:
    """Report ranks that could not write a file in the run's folder."""

    def find_problem(facts: Facts) -> RankProblem | None:
        folder_facts = facts.folder
        if not folder_facts.error or folder_facts.is_full:
            return None
        text = f"cannot write in {folder_facts.path}: {folder_facts.error.lower()}"
        advice = "mount it writable, correct its owner, or choose another with run.folder=..."
        return RankProblem(facts.identity.rank_info.rank, text, advice)

    ok_text = f"a file could be made and removed in {examination.coordinator_facts.folder.path}"
    return make_finding(
        "folder", examination, find_rank_problems(examination, find_problem), ok_text
    )


def _required_space(examination: Examination, rank: int) -> tuple[int, str]:
    if rank == 0:
        return examination.requirements.required_bytes, examination.requirements.required_for
    return BYTES_PER_RANK_LOGS, "time-lines and logs"


SMALL_SHM_BYTES = 256 * 2**20
"""Containers get 64 MB by default; NCCL and a cache of samples need more."""

FILES_PER_RANK = 128
"""Open files that every rank needs: libraries, logs, checkpoint files, the store."""
FILES_PER_PEER = 4
FILES_PER_DECODER = 4
RECOMMENDED_FILES = 4096


def check_hardware(examination: Examination) -> Finding:
    """Report cores, memory and GPUs; warn if ranks have to share a GPU."""

    def find_problem(facts: Facts) -> RankProblem | None:
        gpus, ranks = len(facts.machine.gpus), len(ranks_of_host(examination, facts))
        if not gpus or ranks <= gpus:
            return None
        advice = f"start {gpus} ranks on each host, or let NVIDIA's MPS share the GPUs"
        return RankProblem(
            facts.identity.rank_info.rank, f"{ranks} ranks for {gpus} GPUs", advice, "warn"
        )

    ok_text = join_distinct(_describe_hardware(facts) for facts in examination.facts.values())
    return make_finding(
        "hardware", examination, find_rank_problems(examination, find_problem), ok_text
    )


def check_torch_build(examination: Examination) -> Finding:
    """Check that torch was built with Gloo, and with NCCL if there are GPUs."""

    def find_problem(facts: Facts) -> RankProblem | None:
        rank, backends = facts.identity.rank_info.rank, facts.code.backends
        if "gloo" not in backends:
            advice = "install PyTorch's ordinary wheel: pip install torch"
            return RankProblem(rank, "torch was built without Gloo", advice)
        if facts.machine.gpus and "nccl" not in backends:
            advice = "install a CUDA build of torch to use the GPUs"
            return RankProblem(rank, "GPUs, but torch was built without NCCL", advice, "warn")
        return None

    ok_text = join_distinct(
        f"torch {facts.code.versions['torch']} with {' and '.join(facts.code.backends)}, "
        f"{'CUDA ' + facts.code.cuda if facts.code.cuda else 'no CUDA'}"
        for facts in examination.facts.values()
    )
    return make_finding(
        "torch", examination, find_rank_problems(examination, find_problem), ok_text
    )


def check_file_limit(examination: Examination) -> Finding:
    """Compare the soft limit on open files with what a rank of this run may open."""
    required_count = required_files(examination)

    def find_problem(facts: Facts) -> RankProblem | None:
        machine = facts.machine
        if machine.files_soft >= required_count:
            return None
        text = (
            f"may open {machine.files_soft} files, and a rank of this run needs up to "
            f"{required_count}"
        )
        recommended = max(RECOMMENDED_FILES, required_count)
        advice = f"`ulimit -n {recommended}` before starting"
        if machine.files_hard < recommended:
            advice += f"; the hard limit is {machine.files_hard}, which only root can raise"
        return RankProblem(facts.identity.rank_info.rank, text, advice)

    limits = [facts.machine.files_soft for facts in examination.facts.values()]
    ok_text = f"{min(limits)} open files allowed, at most {required_count} needed"
    return make_finding(
        "file limit", examination, find_rank_problems(examination, find_problem), ok_text
    )


def required_files(examination: Examination) -> int:
    """Return the number of files that a rank may have to keep open."""
    decoders = FILES_PER_DECODER * examination.requirements.decoders
    return FILES_PER_RANK + FILES_PER_PEER * (examination.size - 1) + decoders


def check_shared_memory(examination: Examination) -> Finding:
    """Warn if /dev/shm is as small as in a container by default."""

    def find_problem(facts: Facts) -> RankProblem | None:
        free = facts.machine.shm_bytes
        if free is not None and free >= SMALL_SHM_BYTES:
            return None
        text = "no /dev/shm" if free is None else f"only {format_bytes(free)} free in /dev/shm"
        advice = "give the container more, as with docker run --shm-size=1g"
        return RankProblem(facts.identity.rank_info.rank, text, advice, "warn")

    least = min((facts.machine.shm_bytes or 0) for facts in examination.facts.values())
    ok_text = f"{format_bytes(least)} free in /dev/shm"
    return make_finding(
        "shared memory", examination, find_rank_problems(examination, find_problem), ok_text
    )


def check_threads(examination: Examination) -> Finding:
    """Warn if the ranks of a host have more threads than the cores they may use."""

    def find_problem(facts: Facts) -> RankProblem | None:
        host_ranks = ranks_of_host(examination, facts)
        cores = {core for other in host_ranks for core in other.machine.cores}
        recommended = sum(other.machine.threads for other in host_ranks)
        if recommended <= len(cores):
            return None
        text = f"{recommended} threads on {_cores_text(len(cores))}"
        threads_per_rank = len(cores) // len(host_ranks)
        advice = f"set run.threads={threads_per_rank} or OMP_NUM_THREADS={threads_per_rank}"
        if not threads_per_rank:
            advice = f"start at most {len(cores)} ranks here, or give them more cores"
        return RankProblem(facts.identity.rank_info.rank, text, advice, "warn")

    ok_text = join_distinct(
        f"{facts.machine.threads} per rank, of {_cores_text(len(facts.machine.cores))} it may use"
        for facts in examination.facts.values()
    )
    return make_finding(
        "threads", examination, find_rank_problems(examination, find_problem), ok_text
    )


def ranks_of_host(examination: Examination, facts: Facts) -> list[Facts]:
    """Return the facts of all ranks on the host of ``facts``, including itself."""
    name = facts.identity.rank_info.host_name
    return [
        other for other in examination.facts.values() if other.identity.rank_info.host_name == name
    ]


def _describe_hardware(facts: Facts) -> str:
    machine = facts.machine
    gpus = f"{len(machine.gpus)} x {join_distinct(machine.gpus)}" if machine.gpus else "no GPU"
    return f"{_cores_text(len(machine.cores))}, {format_bytes(machine.memory_bytes)} memory, {gpus}"


def _cores_text(count: int) -> str:
    return f"{count} core{'s' if count > 1 else ''}"
