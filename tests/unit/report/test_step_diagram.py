"""The drawing of a step program: slots of computation and bars from gate to due."""

from xml.etree import ElementTree

import pytest

from stretto.cluster.world import Mesh
from stretto.report.step_diagram import draw_step_svg, draw_step_text, make_step_diagram
from tests.laws.program_settings import SETTINGS, TWO_BY_TWO, Setting


def diagram(kind, **values):
    return make_step_diagram(Setting(kind, values).program(), kind)


def rows(text):
    """Return the part of each row that is right of its label."""
    return [line[44:] for line in text.plain.splitlines() if "lane" in line]


def test_slots_are_backward_update_and_forward():
    shown = diagram("sharded", plan="zero2", unit=0)
    units = (len(shown.slots) - 1) // 2
    backward = [f"B{unit}" for unit in reversed(range(units))]
    assert list(shown.slots) == [*backward, "update", *(f"F{unit}" for unit in range(units))]


def test_a_sum_of_gradients_starts_after_its_backward_and_ends_with_the_update():
    shown = diagram("allreduce", algorithm="ring", bucket_bytes=0)
    first, last = shown.bars[0], shown.bars[-1]
    units = (len(shown.slots) - 1) // 2
    assert (first.gate, first.due) == (1, units)
    assert last.gate == units
    assert units < last.due < units + 1


def test_a_delayed_round_is_due_a_step_after_its_gate():
    shown = diagram("crossover", delay=1)
    assert all(bar.due - bar.gate == len(shown.slots) for bar in shown.bars)


def test_a_bar_that_leaves_on_the_right_enters_on_the_left():
    shown = diagram("crossover", delay=1)
    (first, *_) = rows(draw_step_text(shown, 120))
    assert first.count("[") == 1
    assert first.strip().replace("[", "=") == "=" * len(first.strip())
    pieces = draw_step_svg(shown).count('<rect class="c')
    assert pieces == 2 * len(shown.bars)


def test_what_starts_and_is_awaited_at_once_is_one_sign():
    (row,) = rows(draw_step_text(diagram("local_sgd", every=2), 120))
    assert row.strip() == "|"


def test_the_totals_count_bytes_and_operations():
    shown = diagram("allreduce", algorithm="ring", bucket_bytes=0)
    assert shown.totals[0].startswith(f"{len(shown.bars)} operations; rank 0 sends ")
    single = make_step_diagram(Setting("crossover", {}, (1,)).program(), "crossover")
    assert single.totals[0] == "no communication"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_program_is_drawn(setting):
    shown = make_step_diagram(setting.program(), setting.kind)
    assert len(draw_step_text(shown, 120).plain.splitlines()) >= len(shown.bars)
    ElementTree.fromstring(draw_step_svg(shown))


def test_many_operations_are_cut_and_counted():
    setting = Setting("sharded", {"plan": "zero3", "unit": 0, "block": 40}, TWO_BY_TWO)
    shown = make_step_diagram(setting.program(), "zero3")
    assert len(shown.bars) > 48
    assert f"... and {len(shown.bars) - 48} more" in draw_step_text(shown, 120).plain
    assert Mesh(setting.mesh).size == 4
