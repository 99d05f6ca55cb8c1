"""The collective algorithms, one a file; whoever is in a table is covered by every law."""

from collections.abc import Callable, Mapping

from stretto.comm.algorithms.broadcast import broadcast
from stretto.comm.algorithms.native import native
from stretto.comm.algorithms.ring import ring
from stretto.comm.schedule import Schedule

ALLREDUCE: Mapping[str, Callable[[int], Schedule]] = {
    "native": native,
    "ring": ring,
}

__all__ = ["ALLREDUCE", "broadcast", "native", "ring"]
