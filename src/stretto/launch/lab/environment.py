"""What each rank of a lab finds in its environment: torchrun's words, and the lab's own few."""

from collections.abc import Mapping, Sequence

from stretto.launch.lab.plan import HEAD, LabNames, LabSpec, address, host_of


def rank_environment(
    spec: LabSpec, names: LabNames, rank: int, *, store_port: int
) -> Mapping[str, str]:
    """Return the variables that tell a rank who it is and where the others are."""
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
        "STRETTO_LAUNCHER": "stretto lab",
    }
    if spec.bits_per_s is not None:
        words["STRETTO_LAB_BITS_PER_S"] = spec.bits_per_s
    return {name: str(value) for name, value in words.items()}


def cores_of(spec: LabSpec, rank: int, cores: Sequence[int]) -> Sequence[int]:
    """Return the cores a rank keeps to, so that no host computes on another host's.

    Left to the kernel, three of four ranks may share one of two cores for a while: one host
    would seem slow that is not.
    """
    share = len(cores) // spec.ranks
    return cores[rank * share : (rank + 1) * share] if share else [cores[rank % len(cores)]]


def threads_per_rank(spec: LabSpec, cores: int) -> int:
    """Return an even share of the machine's cores, at least one."""
    return max(1, cores // spec.ranks)
