"""The table of algorithms for one shape of hosts and ranks: measured where it was, else priced."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from stretto.cluster.world import Mesh
from stretto.comm.algorithms import ALLREDUCE, Algorithm
from stretto.comm.algorithms.table import AlgorithmTable, Choice, parse_table
from stretto.comm.schedule import Schedule, pipelined
from stretto.sim.book import AS_GOOD, PriceBook
from stretto.sim.book import Row as Priced
from stretto.sim.catalogue import Choice as Row
from stretto.sim.catalogue import explained, picked
from stretto.sim.cluster import Cluster
from stretto.sim.presets import preset

SMALL = (1_000, 4_000, 16_000, 64_000, 256_000)
LARGE = (1_000_000, 4_000_000, 16_000_000, 64_000_000)
SIZES = SMALL + LARGE
"""The messages a table is made for: from a few gradients to a whole model."""
_NEAR = 1.5
PARTS = (1, 2, 4, 8, 16)
_MOST_MESSAGES = 100_000
"""What would need more to be followed is not tried in parts: every rank makes its own table."""
NATIVE = "native"
IN_A_ROW = 8
"""Messages that are priced together where many follow each other."""
ASSUMED = "ethernet 10gbit"
"""What several hosts are taken to be joined by, where nobody says."""
BOX = "box 400mbit"
_GOODPUT = 0.95
"""What a shaped link leaves to TCP."""


def described(mesh: Mesh, link_bits_per_s: int | None) -> Cluster:
    """Return what is assumed where nothing was measured: a lab's links are known, others not."""
    if link_bits_per_s is None:
        return preset(ASSUMED).with_mesh(mesh)
    box = preset(BOX).with_mesh(mesh)
    link = box.between.model_copy(update={"bytes_per_s": _GOODPUT * link_bits_per_s / 8})
    return box.model_copy(update={"between": link})


def usual_table(mesh: Mesh, *, on_gpu: bool) -> AlgorithmTable:
    """Return the algorithms for links as they are usual, where nobody describes them.

    GPUs are left to the back end, which knows what joins them.
    """
    return choose_table(None, Mesh((1,)) if on_gpu else mesh)


def choose_table(cluster: Cluster | None, mesh: Mesh, *, native: bool = True) -> AlgorithmTable:
    """Return the algorithms for ``mesh``; without the back end's own where it cannot be used.

    Ranks of one host whose links nobody has described use the back end's own: it knows them.
    """
    if cluster is None and mesh.hosts == 1:
        return AlgorithmTable((Choice(0, NATIVE if native else "ring"),))
    if cluster is not None and mesh.shape in cluster.tables:
        table = parse_table(cluster.tables[mesh.shape])
        if native or all(choice.name != NATIVE for choice in table.choices):
            return table
    shaped = (cluster or preset(ASSUMED)).with_mesh(mesh)
    known = {name: make for name, make in ALLREDUCE.items() if native or name != NATIVE}
    return table_of(choose_rows(shaped, known))


def choose_stream(cluster: Cluster | None, mesh: Mesh, *, native: bool = True) -> AlgorithmTable:
    """Return the algorithms for messages of which many follow each other, as a step's buckets do.

    There it counts how soon the next one is through, not how long one takes alone: where phases
    have lanes of their own, the last phase of one message overlaps the first of the next. So what
    is priced is several in a row, each in one part.
    """
    if cluster is None and mesh.hosts == 1:
        return choose_table(None, mesh, native=native)
    shaped = (cluster or preset(ASSUMED)).with_mesh(mesh)
    streams = {
        name: partial(_in_a_row, make)
        for name, make in ALLREDUCE.items()
        if native or name != NATIVE
    }
    book = PriceBook(shaped, streams)
    rows = picked(book.near(book.candidates((1,)), [IN_A_ROW * size for size in SIZES], AS_GOOD))
    choices = [Choice(row.num_bytes // IN_A_ROW, row.name) for row in rows]
    return AlgorithmTable((replace(choices[0], least=0), *choices[1:]))


def choose_alone(cluster: Cluster, sizes: Sequence[int], *, native: bool = True) -> AlgorithmTable:
    """Return the cheapest algorithm for each of ``sizes``, whole and with nothing behind it.

    For so many ranks that to follow a row of messages, or their parts, takes minutes.
    """
    known = {name: make for name, make in ALLREDUCE.items() if native or name != NATIVE}
    book = PriceBook(cluster, known)
    rows = picked(book.near(book.candidates((1,)), sizes, AS_GOOD))
    choices = [Choice(row.num_bytes, row.name) for row in rows]
    return AlgorithmTable((replace(choices[0], least=0), *choices[1:]))


def _in_a_row(make: Algorithm, mesh: Mesh, _parts: int) -> Schedule:
    return pipelined(make(mesh, 1), IN_A_ROW)


def choose_rows(cluster: Cluster, known: Mapping[str, Algorithm] = ALLREDUCE) -> list[Row]:
    """Return the cheapest algorithm by size, with reasons: small messages whole, large in parts.

    Only what is near the best as a whole, and not too large, is tried in parts too.
    """
    book = PriceBook(cluster, known)
    whole = book.candidates((1,))
    small = picked(book.near(whole, SMALL, AS_GOOD))
    near = {row.name: _messages(row) for row in book.near(whole, LARGE, _NEAR).rows}
    in_parts = [
        (name, parts)
        for name, parts in book.candidates(PARTS, [name for name in known if name in near])
        if parts == 1 or near[name] * parts <= _MOST_MESSAGES
    ]
    large = picked(book.near(in_parts, LARGE, AS_GOOD))
    again = (small[-1].name, small[-1].parts) == (large[0].name, large[0].parts)
    return [explained(row, book) for row in (*small, *large[again:])]


def _messages(row: Priced) -> int:
    """Return how many messages have to be followed, of ranks that are not alike."""
    return row.price.num_messages // row.price.copies


def table_of(rows: Sequence[Row]) -> AlgorithmTable:
    """Return the rows as a table, the first from zero bytes on."""
    choices = [Choice(row.from_bytes, row.name, row.parts) for row in rows]
    return AlgorithmTable((replace(choices[0], least=0), *choices[1:]))
