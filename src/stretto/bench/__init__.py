"""Benchmarks of collectives and steps, and measurements that make clusters and profiles."""

from dataclasses import dataclass

DEFAULT_SIZES = "1KB,4KB,16KB,64KB,256KB,1MB,4MB,16MB,64MB"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRequest:
    """The options of `stretto bench collectives`."""

    sizes: str = DEFAULT_SIZES
    """Tensor sizes, as 1KB,32MB."""
    algorithms: str = ""
    """As ring/4,hierarchical/8; "hybrid" for the table's choice; "all"; "likely" (the default)."""
    collective: str = "allreduce"
    """allreduce, reduce-scatter, all-gather or broadcast."""
    wire: str = "own"
    """Format on the wire: own (the tensor's), bf16, fp16 or fp8."""
    device: str = "cpu"
    """cpu (Gloo) or cuda (NCCL)."""
