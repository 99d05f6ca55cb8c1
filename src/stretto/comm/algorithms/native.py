"""The back end's own all-reduce, as one entry of the table among the others."""

from dataclasses import replace

from stretto.comm.algorithms.ring import ring
from stretto.comm.schedule import Schedule


def native(size: int) -> Schedule:
    """Hand the tensor to the back end; taken to be a ring, which is what Gloo does by default."""
    return replace(ring(size), name="native", native=True)
