"""What the machines offer: cores, memory, accelerators, limits, threads."""

from stretto.doctor.checks.problems import Problem, each, finding, per_rank
from stretto.doctor.records import Examination, Facts, Finding
from stretto.units import format_bytes

SMALL_SHM_BYTES = 256 * 2**20
"""Containers get 64 MB unless told otherwise; NCCL and a cache of samples want more."""

FILES_OF_A_RANK = 128
"""Libraries, logs, checkpoint files, the store: what a rank holds open whatever its size."""
FILES_PER_PEER = 4
FILES_PER_DECODER = 4
ROOMY_FILES = 4096


def hardware(seen: Examination) -> Finding:
    """Tell cores, memory and GPUs; warn where ranks have to share a GPU."""

    def look(facts: Facts) -> Problem | None:
        gpus, ranks = len(facts.machine.gpus), len(ranks_of_host(seen, facts))
        if not gpus or ranks <= gpus:
            return None
        advice = f"start {gpus} ranks on each host, or let NVIDIA's MPS share the GPUs"
        return Problem(facts.place.card.rank, f"{ranks} ranks for {gpus} GPUs", advice, "warn")

    fine = each(_describe(facts) for facts in seen.facts.values())
    return finding("hardware", seen, per_rank(seen, look), fine)


def torch_build(seen: Examination) -> Finding:
    """Ask for Gloo everywhere, and for NCCL where there are GPUs."""

    def look(facts: Facts) -> Problem | None:
        rank, backends = facts.place.card.rank, facts.code.backends
        if "gloo" not in backends:
            advice = "install PyTorch's ordinary wheel: pip install torch"
            return Problem(rank, "torch was built without Gloo", advice)
        if facts.machine.gpus and "nccl" not in backends:
            advice = "install a CUDA build of torch to use the GPUs"
            return Problem(rank, "GPUs, but torch was built without NCCL", advice, "warn")
        return None

    fine = each(
        f"torch {facts.code.versions['torch']} with {' and '.join(facts.code.backends)}, "
        f"{'CUDA ' + facts.code.cuda if facts.code.cuda else 'no CUDA'}"
        for facts in seen.facts.values()
    )
    return finding("torch", seen, per_rank(seen, look), fine)


def file_limit(seen: Examination) -> Finding:
    """Hold the soft limit on open files against what a rank of this run may open."""
    need = files_needed(seen)

    def look(facts: Facts) -> Problem | None:
        machine = facts.machine
        if machine.files_soft >= need:
            return None
        text = f"may open {machine.files_soft} files, and a rank of this run needs up to {need}"
        wanted = max(ROOMY_FILES, need)
        advice = f"`ulimit -n {wanted}` before starting"
        if machine.files_hard < wanted:
            advice += f"; the hard limit is {machine.files_hard}, which only root can raise"
        return Problem(facts.place.card.rank, text, advice)

    limits = [facts.machine.files_soft for facts in seen.facts.values()]
    fine = f"{min(limits)} open files allowed, at most {need} needed"
    return finding("file limit", seen, per_rank(seen, look), fine)


def files_needed(seen: Examination) -> int:
    """Return how many files a rank may have to hold open."""
    decoders = FILES_PER_DECODER * seen.purpose.decoders
    return FILES_OF_A_RANK + FILES_PER_PEER * (seen.size - 1) + decoders


def shared_memory(seen: Examination) -> Finding:
    """Warn where /dev/shm is as small as containers make it."""

    def look(facts: Facts) -> Problem | None:
        free = facts.machine.shm_bytes
        if free is not None and free >= SMALL_SHM_BYTES:
            return None
        text = "no /dev/shm" if free is None else f"only {format_bytes(free)} free in /dev/shm"
        advice = "give the container more, as with docker run --shm-size=1g"
        return Problem(facts.place.card.rank, text, advice, "warn")

    least = min((facts.machine.shm_bytes or 0) for facts in seen.facts.values())
    fine = f"{format_bytes(least)} free in /dev/shm"
    return finding("shared memory", seen, per_rank(seen, look), fine)


def threads(seen: Examination) -> Finding:
    """Warn where the threads of a host's ranks outnumber the cores these may use."""

    def look(facts: Facts) -> Problem | None:
        together = ranks_of_host(seen, facts)
        cores = {core for other in together for core in other.machine.cores}
        wanted = sum(other.machine.threads for other in together)
        if wanted <= len(cores):
            return None
        text = f"{wanted} threads on {_cores(len(cores))}"
        fair = len(cores) // len(together)
        advice = f"set run.threads={fair} or OMP_NUM_THREADS={fair}"
        if not fair:
            advice = f"start at most {len(cores)} ranks here, or give them more cores"
        return Problem(facts.place.card.rank, text, advice, "warn")

    fine = each(
        f"{facts.machine.threads} per rank, of {_cores(len(facts.machine.cores))} it may use"
        for facts in seen.facts.values()
    )
    return finding("threads", seen, per_rank(seen, look), fine)


def ranks_of_host(seen: Examination, mine: Facts) -> list[Facts]:
    """Return the facts of all ranks that share a host with ``mine``, itself among them."""
    name = mine.place.card.host_name
    return [other for other in seen.facts.values() if other.place.card.host_name == name]


def _describe(facts: Facts) -> str:
    machine = facts.machine
    gpus = f"{len(machine.gpus)} x {each(machine.gpus)}" if machine.gpus else "no GPU"
    return f"{_cores(len(machine.cores))}, {format_bytes(machine.memory_bytes)} memory, {gpus}"


def _cores(count: int) -> str:
    return f"{count} core{'s' if count > 1 else ''}"
