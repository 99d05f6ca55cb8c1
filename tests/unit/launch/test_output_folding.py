import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.launch.worker_output import (
    FLOOD_LINES,
    FLOOD_S,
    FOLD_WINDOW_S,
    MAX_REMEMBERED_LINES,
    REPEAT_WINDOW_S,
    LineFolder,
    secondary_failure_text,
)
from stretto.telemetry.event_text import ranks_text

LOGS = {rank: f"rank-{rank}.log" for rank in range(10)}

pauses = st.sampled_from([0.0, 0.1, 0.3, 0.7, 11.0])
letters = st.sampled_from("abc")


def printed_by(ranks):
    return st.lists(st.tuples(st.sampled_from(ranks), letters, pauses), max_size=40)


def show(prints):
    """Return the lines on the screen with their times, if `due` is called missing_from delay."""
    folding, now_s, screen = LineFolder(LOGS), 0.0, []
    for rank, text, pause_s in prints:
        while folding.next_due_s() <= now_s + pause_s:
            due_s = folding.next_due_s()
            screen += [(due_s, line) for line in folding.due(due_s)]
        now_s += pause_s
        screen += [(now_s, line) for line in folding.feed(rank, text, now_s)]
    return screen + [(math.inf, line) for line in folding.due(math.inf)]


def named(line):
    """Return the ranks that a line on the screen names."""
    spans = re.match(r"\[ranks? ([0-9, -]+)\] ", line).group(1).split(", ")
    ends = [[int(end) for end in span.split("-")] for span in spans]
    return {rank for span in ends for rank in range(span[0], span[-1] + 1)}


def shown_of(screen, rank):
    lines = [line for _, line in screen if line.startswith("[")]
    return [line.split("] ")[1] for line in lines if rank in named(line)]


@given(printed_by([1, 2, 3, 4]))
def test_without_rank_zero_every_line_of_every_rank_is_shown_in_its_order(prints):
    screen = show(prints)
    for rank in (1, 2, 3, 4):
        assert shown_of(screen, rank) == [text for who, text, _ in prints if who == rank]


def missing_from(said, shown):
    """Return the lines of ``said`` that are not in ``shown``; the order must be the same."""
    left = iter(shown)
    expected, missing = next(left, None), []
    for text in said:
        if text == expected:
            expected = next(left, None)
        else:
            missing.append(text)
    assert expected is None, f"{shown} are not {said} in their order"
    return missing


@given(printed_by([0, 1, 2]))
def test_a_line_is_left_out_only_if_rank_zero_printed_it(prints):
    screen = show(prints)
    of_zero = {text for rank, text, _ in prints if rank == 0}
    for rank in (1, 2):
        said = [text for who, text, _ in prints if who == rank]
        assert set(missing_from(said, shown_of(screen, rank))) <= of_zero


@given(printed_by([0, 1, 2]))
def test_lines_of_rank_zero_pass_unchanged(prints):
    screen = [line for _, line in show(prints) if not line.startswith("[")]
    assert screen == [text for rank, text, _ in prints if rank == 0]


@given(st.lists(letters, max_size=12), st.data())
def test_a_line_of_all_ranks_is_shown_once_in_any_interleaving(texts, data):
    order = data.draw(st.permutations([1, 2, 3] * len(texts)))
    left = {rank: list(texts) for rank in (1, 2, 3)}
    screen = show([(rank, left[rank].pop(0), 0.0) for rank in order])
    assert [line for _, line in screen] == [f"[ranks 1-3] {text}" for text in texts]


@given(printed_by([1, 2, 3]))
def test_no_line_waits_longer_than_the_window(prints):
    folding, now_s = LineFolder(LOGS), 0.0
    for rank, text, pause_s in prints:
        now_s += pause_s
        folding.due(now_s)
        folding.feed(rank, text, now_s)
        assert now_s < folding.next_due_s() <= now_s + FOLD_WINDOW_S


def test_equal_lines_further_apart_than_the_window_are_shown_separately():
    screen = show([(1, "x", 0.0), (2, "x", FOLD_WINDOW_S)])
    assert [line for _, line in screen] == ["[rank 1] x", "[rank 2] x"]


def test_common_lines_are_merged_despite_another_line_between_them():
    screen = show([(1, "a", 0), (1, "b", 0), (2, "mine", 0), (2, "a", 0), (2, "b", 0)])
    assert [line for _, line in screen] == ["[rank 2] mine", "[ranks 1-2] a", "[ranks 1-2] b"]


def test_different_lines_are_shown_in_the_order_of_printing():
    screen = show([(3, "c", 0.0), (1, "a", 0.1), (2, "b", 0.1)])
    assert [line for _, line in screen] == ["[rank 3] c", "[rank 1] a", "[rank 2] b"]


def test_a_waiting_line_is_dropped_when_rank_zero_prints_it():
    assert show([(1, "x", 0.0), (0, "x", 0.1)]) == [(0.1, "x")]


def test_a_line_of_rank_zero_hides_equal_lines_only_for_a_while():
    soon, late = REPEAT_WINDOW_S - 1, 2.0
    screen = show([(0, "x", 0.0), (1, "x", soon), (2, "x", late)])
    assert [line for _, line in screen] == ["x", "[rank 2] x"]


def test_only_the_newest_lines_of_rank_zero_are_remembered():
    folding = LineFolder(LOGS)
    for number in range(MAX_REMEMBERED_LINES + 1):
        folding.feed(0, str(number), 0.0)
    folding.feed(1, "0", 0.0)
    folding.feed(1, "1", 0.0)
    assert folding.due(math.inf) == ["[rank 1] 0"]


@pytest.mark.parametrize("num_lines", [FLOOD_LINES, FLOOD_LINES + 1, 12_345])
def test_a_flood_is_truncated_and_the_rest_counted(num_lines):
    screen = [line for _, line in show([(2, f"line {n}", 0.0) for n in range(num_lines)])]
    assert screen[:FLOOD_LINES] == [f"[rank 2] line {n}" for n in range(FLOOD_LINES)]
    held_back = num_lines - FLOOD_LINES
    note = [f"[rank 2] ... {held_back:,} more lines in rank-2.log"] if held_back else []
    assert screen[FLOOD_LINES:] == note


def test_a_long_flood_shows_its_limit_and_one_note_in_each_period():
    steps, step_s = 4 * FLOOD_LINES, FLOOD_S / FLOOD_LINES / 2
    screen = [line for _, line in show([(1, f"line {n}", step_s) for n in range(steps)])]
    assert len(screen) == 2 * (FLOOD_LINES + 1)
    assert [i for i, line in enumerate(screen) if "more lines" in line] == [100, 201]


def test_a_flood_of_one_rank_does_not_hide_lines_of_others():
    flood = [(1, f"line {n}", 0.0) for n in range(1000)]
    assert "[rank 2] other" in [line for _, line in show([*flood, (2, "other", 0.0)])]


def test_terminal_control_sequences_are_not_shown():
    screen = show([(0, "\x1b[2Jred\x07", 0.0), (1, "a\tb\x1b]0;title\x07", 0.0)])
    assert [line for _, line in screen] == ["[2Jred", "[rank 1] a b]0;title"]


def test_the_last_state_of_a_line_that_overwrites_itself_is_shown():
    assert show([(1, "10%\r20%\r30%\r", 0.0)])[0][1] == "[rank 1] 30%"


def test_blank_lines_of_other_ranks_are_not_shown():
    assert show([(1, "", 0.0), (2, "  ", 0.0)]) == []


def test_blank_lines_of_rank_zero_are_shown():
    assert show([(0, "", 0.0)]) == [(0.0, "")]


@pytest.mark.parametrize(
    ("ranks", "letters"),
    [([2], "rank 2"), ([3, 1, 2], "ranks 1-3"), ({1, 4, 5, 6, 9}, "ranks 1, 4-6, 9")],
)
def test_consecutive_ranks_are_named_as_a_range(ranks, letters):
    assert ranks_text(ranks) == letters


@pytest.mark.parametrize("victim", [0, 1])
def test_the_message_of_a_failed_rank_is_not_shown_again_for_its_victims(victim):
    echo = f"stretto: {secondary_failure_text(2, 'no room')}"
    assert echo == "stretto: rank 2 failed first: no room"
    screen = show([(2, "stretto: no room", 0.0), (victim, echo, 0.1)])
    assert [line for _, line in screen] == ["[rank 2] stretto: no room"]
