"""Algorithm tables: formatting, parsing and picking by size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.cluster.world import Mesh
from stretto.collectives.algorithm_table import (
    MAX_PARTS,
    AlgorithmChoice,
    AlgorithmTable,
    parse_algorithm,
    parse_table,
)
from stretto.collectives.algorithms import ALLREDUCE, BROADCAST
from stretto.errors import ConfigError

SIZES = st.integers(1, 1 << 40) | st.integers(1, 10**6).map(lambda kilobytes: 1000 * kilobytes)


@st.composite
def tables(draw):
    leasts = [0, *sorted(draw(st.sets(SIZES, max_size=4)))]
    algorithms = st.tuples(st.sampled_from(sorted(ALLREDUCE)), st.integers(1, MAX_PARTS))
    return AlgorithmTable(
        tuple(AlgorithmChoice(min_bytes, *draw(algorithms)) for min_bytes in leasts)
    )


@given(tables())
def test_a_table_reads_back_as_itself(table):
    assert parse_table(str(table)) == table


@given(tables(), SIZES)
def test_a_size_gets_the_last_choice_at_or_below_it(table, size):
    picked = table.pick(size)
    assert picked.min_bytes <= size
    assert all(
        other.min_bytes <= picked.min_bytes or other.min_bytes > size for other in table.choices
    )


def test_sizes_and_parts_are_read_as_people_write_them():
    table = parse_table(" doubling ,hierarchical/8 from 1.5MB, ring/1 from 2MiB ")
    assert table.choices == (
        AlgorithmChoice(0, "doubling"),
        AlgorithmChoice(1_500_000, "hierarchical", 8),
        AlgorithmChoice(2 << 20, "ring"),
    )
    assert str(table) == "doubling, hierarchical/8 from 1500KB, ring from 2097152"


def test_a_choice_becomes_a_schedule_in_its_parts():
    assert AlgorithmChoice(0, "ring", 4).schedule(Mesh((2, 2))).name == "ring/4"
    assert AlgorithmChoice(0, "ring").schedule(Mesh((2, 2))).name == "ring"


@pytest.mark.parametrize(
    ("text", "excerpts"),
    [
        ("", ["no algorithm ''"]),
        ("rign", ["no algorithm 'rign'", "did you mean", "ring"]),
        ("ring, doubling", ['write "NAME" or "NAME, NAME from SIZE"']),
        ("ring from 1MB", ['write "NAME" or "NAME, NAME from SIZE"']),
        ("ring, doubling from 0", ["sizes growing to the right"]),
        ("ring, doubling from 1MB, native from 1MB", ["sizes growing to the right"]),
        ("ring, doubling from 1MB, native from 1KB", ["sizes growing to the right"]),
        ("ring, doubling from many", ['a size such as "2MB"', "many"]),
        ("ring,", ['write "NAME"']),
        ("ring/0", ["parts are a number from 1 to 256", "ring/8"]),
        ("ring/257", ["parts are a number from 1 to 256"]),
        ("ring/-2", ["parts are a number"]),
        ("ring/", ["parts are a number"]),
        ("ring/two", ["parts are a number"]),
        ("ring/2/2", ["parts are a number"]),
    ],
)
def test_an_invalid_table_is_refused_with_advice(text, excerpts):
    with pytest.raises(ConfigError) as wrong:
        parse_table(text)
    assert all(excerpt in str(wrong.value) for excerpt in excerpts)


def test_an_algorithm_is_looked_up_among_those_of_its_collective():
    assert parse_algorithm("scatter-gather/4", BROADCAST.keys()) == ("scatter-gather", 4)
    with pytest.raises(ConfigError, match="no algorithm 'ring'"):
        parse_algorithm("ring", BROADCAST.keys())
