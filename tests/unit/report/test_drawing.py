"""Drawings of schedules: messages, totals, text and SVG."""

import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms import ALL_GATHER, ALLREDUCE, BROADCAST, REDUCE_SCATTER
from stretto.collectives.schedule import Action, Op, Schedule
from stretto.errors import ConfigError, ScheduleError
from stretto.report.schedule_diagram import (
    excerpt_lengths,
    link_traffic,
    make_diagram,
    message_label,
    messages_by_step,
    rank_traffic,
    totals,
)
from stretto.report.schedule_messages import messages
from stretto.report.schedule_svg import MOST_ARROWS, Arrow, LabelBox, draw_svg, place_label
from stretto.report.schedule_terminal import draw_text
from tests.unit.report.hostile import HOSTILE

SVG = "{http://www.w3.org/2000/svg}"
MESHES = [(1,), (5,), (2, 2), (3, 1, 2)]
TABLES = {
    "allreduce": ALLREDUCE,
    "reduce-scatter": REDUCE_SCATTER,
    "all-gather": ALL_GATHER,
    "broadcast": BROADCAST,
}
ALL_CASES = [
    pytest.param(algorithm, Mesh(mesh), id=f"{collective}-{name}-{mesh}")
    for collective, table in TABLES.items()
    for name, algorithm in table.items()
    for mesh in MESHES
    if len(set(mesh)) == 1 or table is ALLREDUCE  # others may want hosts of equal size
]


def diagram(name, *ranks_per_host, parts=1, table=ALLREDUCE):
    mesh = Mesh(ranks_per_host)
    return make_diagram(table[name](mesh, parts), mesh, "allreduce")


def of(size, *programs, num_chunks=1, name="made up"):
    return Schedule(name, size, num_chunks, lambda rank: programs[rank])


def parsed(shown):
    return ElementTree.fromstring(draw_svg(shown))


def texts(root, colour_index):
    return [e for e in root.iter(f"{SVG}text") if colour_index in e.get("class").split()]


@pytest.mark.parametrize("size", range(1, 7))
def test_a_ring_takes_2_n_less_1_steps_and_each_rank_sends_once_in_each(size):
    by_step = messages_by_step(diagram("ring", size))
    assert len(by_step) == 2 * (size - 1)
    for step in by_step:
        assert [(m.source, m.target) for m in step] == [(r, (r + 1) % size) for r in range(size)]


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_doubling_takes_log2_n_steps(size):
    assert len(messages_by_step(diagram("doubling", size))) == math.log2(size)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("algorithm", "mesh"), ALL_CASES)
def test_every_message_that_is_sent_is_listed_once(algorithm, mesh, parts):
    schedule = algorithm(mesh, parts)
    sent = Counter(
        (rank, op.peer, op.start, op.stop, op.lane)
        for rank in range(mesh.size)
        for op in schedule.program(rank)
        if op.action is Action.SEND
    )
    listed = messages(schedule, 10_000)
    assert Counter((m.source, m.target, m.start, m.stop, m.lane) for m in listed) == sent


def steps_by_dependencies(schedule):
    """Return the step of every message, by route and index on it, computed from ``after`` only."""
    ends = {}  # for each message, numbered along its route: (rank, op) of both its ends
    numbered = {}
    for rank in range(schedule.size):
        passed = Counter()
        for index, op in enumerate(schedule.program(rank)):
            sends = op.action is Action.SEND
            route = (rank, op.peer, op.lane) if sends else (op.peer, rank, op.lane)
            message = numbered[rank, index] = (*route, passed[route])
            passed[route] += 1
            ends.setdefault(message, []).append((rank, op))

    @cache
    def step(message):
        needed = {numbered[rank, index] for rank, op in ends[message] for index in op.after}
        return 1 + max(map(step, needed), default=0)

    return {message: step(message) for message in ends}


def steps_listed(schedule):
    passed = Counter()
    found = {}
    for m in messages(schedule, 10_000):
        route = (m.source, m.target, m.lane)
        found[*route, passed[route]] = m.step
        passed[route] += 1
    return found


@pytest.mark.parametrize(("algorithm", "mesh"), ALL_CASES)
def test_a_step_is_one_more_than_the_last_that_either_end_waits_for(algorithm, mesh):
    schedule = algorithm(mesh, 1)
    assert steps_listed(schedule) == steps_by_dependencies(schedule)


@pytest.mark.parametrize(("algorithm", "mesh"), ALL_CASES)
def test_parts_wait_for_their_lane_as_well_and_no_step_is_empty(algorithm, mesh):
    schedule = algorithm(mesh, 3)
    listed, least = steps_listed(schedule), steps_by_dependencies(schedule)
    assert listed.keys() == least.keys()
    assert all(listed[message] >= least[message] for message in least)
    assert set(listed.values()) == set(range(1, max(listed.values(), default=0) + 1))


def test_a_lane_waits_for_all_of_a_round_before_it_begins_the_next():
    first = Op(Action.SEND, 1, 0, 1), Op(Action.SEND, 2, 0, 1)
    then = Op(Action.SEND, 1, 1, 2, after=(0,))  # waits for the first, is sent after both
    slow = Op(Action.ADD, 1, 1, 2), Op(Action.COPY, 0, 0, 1, after=(0,))
    schedule = of(
        3,
        (*first, then),
        (
            Op(Action.SEND, 2, 1, 2, lane=0),
            Op(Action.COPY, 0, 0, 1),
            Op(Action.COPY, 0, 1, 2, (1,)),
        ),
        slow,
        num_chunks=2,
    )
    assert {(m.source, m.target, m.start): m.step for m in messages(schedule, 10)} == {
        (1, 2, 1): 1,
        (0, 1, 0): 1,
        (0, 2, 0): 2,
        (0, 1, 1): 3,
    }


def test_a_message_without_a_receive_is_an_error():
    with pytest.raises(ScheduleError, match="what rank 0 sends on lane 0 is not what rank 1"):
        messages(of(2, (Op(Action.SEND, 1, 0, 1),), ()), 10)


def test_a_receive_of_other_chunks_is_an_error():
    programs = (Op(Action.SEND, 1, 0, 1),), (Op(Action.ADD, 0, 1, 2),)
    with pytest.raises(ScheduleError, match="is not what rank 1 expects"):
        messages(of(2, *programs, num_chunks=2), 10)


def test_a_deadlock_is_an_error():
    def waits(peer):
        return Op(Action.COPY, peer, 0, 1), Op(Action.SEND, peer, 0, 1, after=(0,))

    with pytest.raises(ScheduleError, match="circle"):
        messages(of(2, waits(1), waits(0)), 10)


def test_more_messages_than_asked_for_are_refused_with_what_to_do():
    schedule = ALLREDUCE["ring"](Mesh((4,)), 1)
    assert len(messages(schedule, 24)) == 24
    with pytest.raises(ConfigError, match=r"more than 23 messages.*use fewer ranks or parts"):
        messages(schedule, 23)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_ring_sends_2_n_less_1_nths_of_the_tensor(size):
    for load in rank_traffic(diagram("ring", size)):
        assert (load.sent, load.received) == (2 * (size - 1),) * 2
        assert (load.sent_chunks, load.received_chunks) == (2 * (size - 1),) * 2


@pytest.mark.parametrize(("hosts", "each"), [(2, 4), (3, 2), (4, 2)])
def test_over_a_hosts_link_go_2_m_less_1_mths_of_the_tensor_if_hierarchical(hosts, each):
    shown = diagram("hierarchical", *(each,) * hosts, parts=2)
    for load in link_traffic(shown):
        assert load.sent_chunks / shown.num_chunks == pytest.approx(2 * (hosts - 1) / hosts)
        assert load.sent_chunks == load.received_chunks


def test_totals_say_what_a_ring_costs():
    assert totals(diagram("ring", 4)) == [
        "6 steps one after another, 24 messages in all",
        "each rank: 6 messages (1.5 x the tensor) out, as much in",
    ]
    assert totals(diagram("ring", 2, 2))[-1] == "each host's link: 1.5 x the tensor each way"
    assert totals(diagram("ring", 1)) == ["nothing is sent: there is only one rank"]


def test_totals_name_the_ranks_that_differ():
    sentences = totals(diagram("doubling", 3))
    assert "ranks 0, 2: 1 message (1 x the tensor) out, as much in" in sentences
    assert "rank 1: 2 messages (2 x the tensor) out, as much in" in sentences


def test_many_different_loads_are_shown_as_a_range():
    send = [Op(Action.SEND, peer, 0, 1) for peer in range(1, 9)]
    # Rank r receives from all lower ranks and sends to all higher ones, so all loads differ.
    chain = [
        tuple(
            [Op(Action.COPY, p, 0, 1, after=tuple(range(p))) for p in range(r)]
            + [op._replace(after=tuple(range(r))) for op in send[r:]]
        )
        for r in range(9)
    ]
    mesh = Mesh((9,))
    sentences = totals(make_diagram(of(9, *chain), mesh, "broadcast"))
    assert sentences[1:] == [
        "ranks differ, from: nothing out, 8 messages (8 x the tensor) in",
        "to: 8 messages (8 x the tensor) out, nothing in",
    ]


def test_lanes_are_named_by_what_is_sent_on_them():
    assert list(diagram("hierarchical", 2, 2, parts=2).lanes.values()) == [
        "lane 0, inside hosts, adding",
        "lane 1, between hosts",
        "lane 2, inside hosts, copying",
    ]
    assert list(diagram("ring", 3, parts=2).lanes.values()) == ["lane 0", "lane 1"]


def test_native_schedules_have_a_note():
    assert "one native call" in diagram("native", 2).note
    assert diagram("native", 2).note in draw_text(diagram("native", 2), 100).plain
    assert "one native call" in draw_svg(diagram("native", 2))


@pytest.mark.parametrize(
    "weights", [[1], [9, 9], [2] * 5, [2] * 30, [1, 50, 1, 1, 50, 2], [99] * 4]
)
@pytest.mark.parametrize("most", [1, 10, 30, 1000])
def test_an_excerpt_begins_and_ends_with_the_whole_and_keeps_to_its_limit(weights, most):
    first, last = excerpt_lengths(weights, most)
    assert 1 <= first <= len(weights)
    assert first + last <= len(weights)
    assert last >= 1 or first == len(weights)
    taken = weights[:first] + weights[len(weights) - last :]
    assert sum(taken) <= most or len(taken) <= 2 or sum(weights[1:-1]) == 0
    if sum(weights) <= most:
        assert first == len(weights)


@pytest.mark.parametrize(("algorithm", "mesh"), ALL_CASES)
def test_a_terminal_shows_every_arrow(algorithm, mesh):
    shown = make_diagram(algorithm(mesh, 1), mesh, "allreduce")
    if len(shown.messages) > 60:
        pytest.skip("drawn in excerpts")
    rows = [line for line in draw_text(shown, 200).plain.splitlines() if "|" in line]
    arrows = Counter(re.findall(r"[+=][\d-]*\d", "\n".join(rows)))
    assert arrows == Counter(message_label(message) for message in shown.messages)
    heads = Counter("".join(rows))
    assert heads[">"] == sum(m.source < m.target for m in shown.messages)
    assert heads["<"] == sum(m.source > m.target for m in shown.messages)


def test_the_drawing_of_a_ring_of_three():
    assert draw_text(diagram("ring", 3), 80).plain.splitlines()[2:9] == [
        "step    rank 0   rank 1   rank 2",
        "   1      |-- +2 ->|-- +0 ->|",
        "          |<------ +1 ------|",
        "          |        |        |",
        "   2      |-- +1 ->|-- +2 ->|",
        "          |<------ +0 ------|",
        "          |        |        |",
    ]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("size", [2, 8, 30, 60])
def test_no_line_of_a_drawing_is_wider_than_the_terminal(size, width):
    text = draw_text(diagram("ring", size), width).plain
    body = text.split("\n\n")[1]
    assert max(map(len, body.splitlines())) <= width
    assert text.isascii()


def test_of_many_ranks_the_first_and_last_steps_are_listed():
    text = draw_text(diagram("ring", 30), 120).plain
    assert "step 1: 30 messages" in text
    assert "step 58: 30 messages" in text
    shown = len(re.findall(r"^step \d+:", text, re.M))
    assert f"... {58 - shown} more steps ..." in text
    assert "0 -> 1 +29" in text
    assert "... 22 more" in text


def test_colours_of_a_terminal_show_actions_or_lanes():
    def colours(shown):
        return {span.style for span in draw_text(shown, 120).spans} - {"bold", "dim", ""}

    assert colours(diagram("ring", 3)) == {"blue", "yellow"}
    assert colours(diagram("hierarchical", 2, 2)) == {"blue", "yellow", "green"}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("algorithm", "mesh"), ALL_CASES)
def test_an_svg_has_an_arrow_and_a_label_for_every_message_inside_its_frame(algorithm, mesh, parts):
    shown = make_diagram(algorithm(mesh, parts), mesh, "allreduce")
    root = parsed(shown)
    arrows = [group.find(f"{SVG}line") for group in root.iter(f"{SVG}g")]
    assert len(arrows) == len(shown.messages)
    assert Counter(e.text for e in texts(root, "label")) == Counter(
        map(message_label, shown.messages)
    )
    _, _, width, height = map(float, root.get("viewBox").split())
    for line in arrows:
        assert all(0 < float(line.get(x)) < width for x in ("x1", "x2"))
        assert all(0 < float(line.get(y)) < height for y in ("y1", "y2"))
    assert all(0 < float(e.get("y")) < height for e in root.iter(f"{SVG}text"))


@pytest.mark.parametrize("name", ["ring", "hierarchical"])
def test_no_arrow_of_an_svg_hides_another(name):
    root = parsed(diagram(name, 2, 2, parts=4))
    ends = [tuple(group.find(f"{SVG}line").attrib.items()) for group in root.iter(f"{SVG}g")]
    assert len({tuple(v for k, v in end if k in {"x1", "x2", "y1", "y2"}) for end in ends}) == len(
        ends
    )


def test_time_goes_downwards_and_a_copy_is_dashed():
    shown = diagram("ring", 4)
    lines = [group.find(f"{SVG}line") for group in parsed(shown).iter(f"{SVG}g")]
    assert all(float(line.get("y1")) < float(line.get("y2")) for line in lines)
    assert [line.get("class").split()[0] for line in lines] == [
        message.action.value for message in shown.messages
    ]


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["ring", "doubling"])
def test_labels_of_small_pictures_do_not_cover_each_other(name, size):
    boxes = [
        LabelBox(float(e.get("x")), float(e.get("y")), 3.4 * len(e.text), 5.0)
        for e in texts(parsed(diagram(name, size)), "label")
    ]
    for index, box in enumerate(boxes):
        assert not any(box.overlap(other) for other in boxes[:index])


def test_a_label_moves_along_its_arrow_out_of_the_way():
    arrow, size = Arrow(0, 0, 100, 50), (20, 12)
    first = place_label(arrow, 30, size, [])
    assert (first.x, first.y) == (30, 15)
    assert not place_label(arrow, 30, size, [first]).overlap(first)


def test_hosts_are_drawn_where_there_are_several():
    assert [e.text for e in texts(parsed(diagram("ring", 2, 2)), "name") if "host" in e.text] == [
        "host 0",
        "host 1",
    ]
    assert "host" not in "".join(e.text for e in texts(parsed(diagram("ring", 4)), "name"))


def test_steps_that_are_left_out_of_an_svg_are_counted_in_it():
    shown = diagram("ring", 32)
    root = parsed(shown)
    arrows = len(list(root.iter(f"{SVG}g")))
    assert arrows <= MOST_ARROWS
    left_out = (len(shown.messages) - arrows) // 32
    assert f"... {left_out} more steps left out ..." in [e.text for e in texts(root, "name")]


def test_too_many_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"33 ranks are too many.*at most 32"):
        draw_svg(diagram("ring", 33))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_only_text(name):
    mesh = Mesh((2,))
    shown = make_diagram(replace(ALLREDUCE["ring"](mesh, 1), name=name), mesh, name)
    tags = {element.tag for element in parsed(shown).iter()}
    assert tags == {e.tag for e in parsed(diagram("ring", 2)).iter()}
    assert "\x1b" not in draw_text(shown, 100).plain
