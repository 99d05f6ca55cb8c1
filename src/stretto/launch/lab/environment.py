"""What each rank of a lab finds in its environment: torchrun's words, and the lab's own few."""

from collections.abc import Mapping

from stretto.launch.lab.plan import HEAD, LabNames, LabSpec, address, host_of


def rank_environment(
    spec: LabSpec, names: LabNames, rank: int, *, store_port: int, threads: int | None
) -> Mapping[str, str]:
    """Return the variables of one rank; ``threads`` None leaves the number of threads alone."""
    words: dict[str, object] = {
        "RANK": rank,
        "WORLD_SIZE": spec.ranks,
        "LOCAL_RANK": rank % spec.ranks_per_host,
        "LOCAL_WORLD_SIZE": spec.ranks_per_host,
        "GROUP_RANK": host_of(spec, rank),
        "GROUP_WORLD_SIZE": spec.hosts,
        "MASTER_ADDR": address(HEAD),
        "MASTER_PORT": store_port,
        # The head holds the store: rank 0 connects like all others instead of opening one.
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "GLOO_SOCKET_IFNAME": names.link,
    }
    if spec.bits_per_s is not None:
        words["STRETTO_LAB_BITS_PER_S"] = spec.bits_per_s
    if threads is not None:
        words["OMP_NUM_THREADS"] = threads
    return {name: str(value) for name, value in words.items()}


def threads_per_rank(spec: LabSpec, cores: int) -> int:
    """Return an even share of the machine's cores, at least one."""
    return max(1, cores // spec.ranks)
