"""What somebody wants timed, as it is said on a command line."""

from dataclasses import dataclass

SIZES = "1KB,4KB,16KB,64KB,256KB,1MB,4MB,16MB,64MB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which collectives to time."""

    sizes: str = SIZES
    """Bytes of the tensor, as 1KB,32MB."""
    algorithms: str = ""
    """As ring/4,hierarchical/8; "hybrid" for the table's; "all"; "likely", also when left out."""
    collective: str = "allreduce"
    """allreduce, reduce-scatter, all-gather or broadcast."""
    wire: str = "own"
    """What travels: own, bf16, fp16, fp8."""
    device: str = "cpu"
    """cpu (Gloo) or cuda (NCCL)."""
