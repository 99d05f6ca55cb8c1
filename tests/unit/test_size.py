"""The tail of the tree stays short, and what measures it measures right."""

import textwrap

import pytest

from tools.size import Measured, measure, percentile, python_files


@pytest.fixture(scope="module")
def tree():
    return measure(python_files())


def test_nine_functions_in_ten_have_at_most_30_lines(tree):
    assert tree.function_p90 <= 30


def test_no_function_is_over_60_lines(tree):
    assert [f for f in tree.functions if f.size > 60] == []


def test_no_file_is_over_400_lines(tree):
    assert [f for f in tree.files if f.size > 400] == []


def test_no_constructor_takes_more_than_6_arguments(tree):
    assert [c for c in tree.constructors if c.size > 6] == []


def test_the_tree_that_is_measured_is_the_one_there_is(tree):
    places = {f.where for f in tree.files}
    assert {"src/stretto/run.py", "tools/size.py", "examples/plain_pytorch.py"} <= places


@pytest.fixture
def measured(tmp_path):
    def run(text: str):
        path = tmp_path / "some.py"
        path.write_text(textwrap.dedent(text).lstrip())
        return measure([path], root=tmp_path)

    return run


def test_a_function_is_as_long_as_from_def_to_its_last_line(measured):
    sizes = measured(
        """
        @decorated
        def outer():
            def inner():
                return 1

            return inner
        """
    )
    assert sizes.functions == [Measured(5, "some.py:2 outer"), Measured(2, "some.py:3 inner")]
    assert sizes.files == [Measured(6, "some.py")]


def test_every_argument_of_a_constructor_counts_except_self(measured):
    sizes = measured(
        """
        class Wide:
            def __init__(self, a, /, b, *more, c=1, **rest):
                pass
        """
    )
    assert sizes.constructors == [Measured(5, "some.py:2 Wide")]


def test_a_dataclass_has_no_constructor_to_count(measured):
    sizes = measured(
        """
        @dataclass
        class Record:
            a: int
            b: int
        """
    )
    assert sizes.constructors == []


def test_suppressions_are_counted_in_comments_and_not_in_strings(measured):
    sizes = measured(
        """
        # ruff: noqa: N803 - a whole file
        a = 1  # noqa: E501 - a line
        b = 2  # type: ignore[misc]
        c = "no # noqa here"
        """
    )
    assert sizes.suppressions == ["some.py:1", "some.py:2", "some.py:3"]


@pytest.mark.parametrize(("values", "p90"), [([], 0), ([7], 7), (list(range(101)), 90)])
def test_the_ninetieth_percentile(values, p90):
    assert percentile(values, 90) == p90
