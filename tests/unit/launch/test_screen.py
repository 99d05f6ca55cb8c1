import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.launch.screen import (
    FLOOD_LINES,
    FLOOD_S,
    MOST_REMEMBERED,
    REMEMBERED_S,
    WINDOW_S,
    Folding,
    echo_of,
)
from stretto.telemetry.wording import ranks_in_words

LOGS = {rank: f"rank-{rank}.log" for rank in range(10)}

pauses = st.sampled_from([0.0, 0.1, 0.3, 0.7, 11.0])
words = st.sampled_from("abc")


def spoken(ranks):
    return st.lists(st.tuples(st.sampled_from(ranks), words, pauses), max_size=40)


def show(speeches):
    """Return the lines on the screen with their times, of an attentive reader."""
    folding, now_s, screen = Folding(LOGS), 0.0, []
    for rank, text, pause_s in speeches:
        while folding.next_s() <= now_s + pause_s:
            due_s = folding.next_s()
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


@given(spoken([1, 2, 3, 4]))
def test_without_rank_zero_every_line_of_every_rank_is_shown_in_its_order(speeches):
    screen = show(speeches)
    for rank in (1, 2, 3, 4):
        assert shown_of(screen, rank) == [text for who, text, _ in speeches if who == rank]


def without(said, shown):
    """Return what of ``said`` is not in ``shown``, which must keep its order."""
    left = iter(shown)
    wanted, missing = next(left, None), []
    for text in said:
        if text == wanted:
            wanted = next(left, None)
        else:
            missing.append(text)
    assert wanted is None, f"{shown} are not {said} in their order"
    return missing


@given(spoken([0, 1, 2]))
def test_a_line_is_left_out_only_if_rank_zero_said_it(speeches):
    screen = show(speeches)
    of_zero = {text for rank, text, _ in speeches if rank == 0}
    for rank in (1, 2):
        said = [text for who, text, _ in speeches if who == rank]
        assert set(without(said, shown_of(screen, rank))) <= of_zero


@given(spoken([0, 1, 2]))
def test_rank_zero_passes_as_it_is(speeches):
    screen = [line for _, line in show(speeches) if not line.startswith("[")]
    assert screen == [text for rank, text, _ in speeches if rank == 0]


@given(st.lists(words, max_size=12), st.data())
def test_what_all_ranks_say_is_shown_once_however_they_interleave(texts, data):
    turns = data.draw(st.permutations([1, 2, 3] * len(texts)))
    left = {rank: list(texts) for rank in (1, 2, 3)}
    screen = show([(rank, left[rank].pop(0), 0.0) for rank in turns])
    assert [line for _, line in screen] == [f"[ranks 1-3] {text}" for text in texts]


@given(spoken([1, 2, 3]))
def test_no_line_waits_longer_than_the_window(speeches):
    folding, now_s = Folding(LOGS), 0.0
    for rank, text, pause_s in speeches:
        now_s += pause_s
        folding.due(now_s)
        folding.feed(rank, text, now_s)
        assert now_s < folding.next_s() <= now_s + WINDOW_S


def test_ranks_that_say_the_same_later_than_the_window_are_shown_apart():
    screen = show([(1, "x", 0.0), (2, "x", WINDOW_S)])
    assert [line for _, line in screen] == ["[rank 1] x", "[rank 2] x"]


def test_a_line_between_common_ones_does_not_unfold_them():
    screen = show([(1, "a", 0), (1, "b", 0), (2, "mine", 0), (2, "a", 0), (2, "b", 0)])
    assert [line for _, line in screen] == ["[rank 2] mine", "[ranks 1-2] a", "[ranks 1-2] b"]


def test_lines_that_differ_are_shown_in_the_order_they_were_said():
    screen = show([(3, "c", 0.0), (1, "a", 0.1), (2, "b", 0.1)])
    assert [line for _, line in screen] == ["[rank 3] c", "[rank 1] a", "[rank 2] b"]


def test_a_line_that_waits_is_dropped_when_rank_zero_says_it():
    assert show([(1, "x", 0.0), (0, "x", 0.1)]) == [(0.1, "x")]


def test_a_line_of_rank_zero_stands_for_others_only_for_a_while():
    soon, late = REMEMBERED_S - 1, 2.0
    screen = show([(0, "x", 0.0), (1, "x", soon), (2, "x", late)])
    assert [line for _, line in screen] == ["x", "[rank 2] x"]


def test_rank_zero_is_remembered_by_its_newest_lines_only():
    folding = Folding(LOGS)
    for number in range(MOST_REMEMBERED + 1):
        folding.feed(0, str(number), 0.0)
    folding.feed(1, "0", 0.0)
    folding.feed(1, "1", 0.0)
    assert folding.due(math.inf) == ["[rank 1] 0"]


@pytest.mark.parametrize("num_lines", [FLOOD_LINES, FLOOD_LINES + 1, 12_345])
def test_a_flood_is_cut_and_the_rest_counted(num_lines):
    screen = [line for _, line in show([(2, f"line {n}", 0.0) for n in range(num_lines)])]
    assert screen[:FLOOD_LINES] == [f"[rank 2] line {n}" for n in range(FLOOD_LINES)]
    held_back = num_lines - FLOOD_LINES
    told = [f"[rank 2] ... {held_back:,} more lines in rank-2.log"] if held_back else []
    assert screen[FLOOD_LINES:] == told


def test_a_flood_that_goes_on_shows_its_share_and_one_remark_in_each_period():
    steps, step_s = 4 * FLOOD_LINES, FLOOD_S / FLOOD_LINES / 2
    screen = [line for _, line in show([(1, f"line {n}", step_s) for n in range(steps)])]
    assert len(screen) == 2 * (FLOOD_LINES + 1)
    assert [i for i, line in enumerate(screen) if "more lines" in line] == [100, 201]


def test_a_flood_of_one_rank_leaves_the_others_their_lines():
    flood = [(1, f"line {n}", 0.0) for n in range(1000)]
    assert "[rank 2] heard" in [line for _, line in show([*flood, (2, "heard", 0.0)])]


def test_what_steers_a_terminal_is_not_shown():
    screen = show([(0, "\x1b[2Jred\x07", 0.0), (1, "a\tb\x1b]0;title\x07", 0.0)])
    assert [line for _, line in screen] == ["[2Jred", "[rank 1] a b]0;title"]


def test_of_a_line_that_overwrites_itself_the_last_state_is_shown():
    assert show([(1, "10%\r20%\r30%\r", 0.0)])[0][1] == "[rank 1] 30%"


def test_blank_lines_of_other_ranks_are_not_worth_a_row():
    assert show([(1, "", 0.0), (2, "  ", 0.0)]) == []


def test_blank_lines_of_rank_zero_are_part_of_its_picture():
    assert show([(0, "", 0.0)]) == [(0.0, "")]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([2], "rank 2"), ([3, 1, 2], "ranks 1-3"), ({1, 4, 5, 6, 9}, "ranks 1, 4-6, 9")],
)
def test_ranks_are_named_in_runs(ranks, words):
    assert ranks_in_words(ranks) == words


@pytest.mark.parametrize("victim", [0, 1])
def test_what_a_failed_rank_said_is_not_shown_again_for_its_victims(victim):
    echo = f"stretto: {echo_of(2, 'no room')}"
    assert echo == "stretto: rank 2 failed first: no room"
    screen = show([(2, "stretto: no room", 0.0), (victim, echo, 0.1)])
    assert [line for _, line in screen] == ["[rank 2] stretto: no room"]
