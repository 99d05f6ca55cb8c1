"""How large a message must be to be worth sending: the block size B*.

A message of n bytes takes about latency + n / rate, so it reaches the share e of the rate once
n = e / (1 - e) x latency x rate. Gradients are fused up to that size and no further: larger buckets
leave later and gain little. The share is high because messages take cores from backward, which a
price of communication alone does not count.
"""

from stretto.comm.algorithms.table import AlgorithmTable
from stretto.sim.cluster import Cluster
from stretto.sim.price import price

EFFICIENCY = 0.98
_NEAR, _FAR = 16_000_000, 64_000_000
"""Where a price is a line in the number of bytes."""
_LEAST, _MOST = 64_000, 64_000_000


def block_bytes(latency_s: float, bytes_per_s: float, efficiency: float = EFFICIENCY) -> float:
    """Return the smallest message that reaches ``efficiency`` of the rate."""
    return efficiency / (1 - efficiency) * latency_s * bytes_per_s


def fusion_threshold(cluster: Cluster, table: AlgorithmTable) -> int:
    """Return B* for what ``table`` sends on ``cluster``, to the kilobyte."""
    near_s, far_s = (_seconds(cluster, table, size) for size in (_NEAR, _FAR))
    bytes_per_s = (_FAR - _NEAR) / (far_s - near_s)
    latency_s = max(0.0, near_s - _NEAR / bytes_per_s)
    wanted = round(block_bytes(latency_s, bytes_per_s), -3)
    return int(min(max(wanted, _LEAST), _MOST))


def _seconds(cluster: Cluster, table: AlgorithmTable, num_bytes: int) -> float:
    schedule = table.pick(_FAR).schedule(cluster.mesh)
    return price(schedule, num_bytes, cluster).seconds
