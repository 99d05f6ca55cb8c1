import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import ScheduleError, StrettoError
from stretto.sim import engine
from stretto.sim.engine import run, run_columns, run_single
from stretto.sim.fair import fair_speeds, fair_speeds_of_few
from stretto.sim.tasks import Job, Tasks, tasks_of, timelines_of

LOOPS = [run, run_single, run_columns]


def ends(jobs, loop=run):
    return loop(tasks_of(jobs)).end_s.tolist()


@pytest.mark.parametrize("loop", LOOPS)
def test_jobs_of_one_lane_follow_each_other_and_lanes_run_beside_each_other(loop):
    jobs = [
        Job("a", 0, "compute", 2.0),
        Job("b", 0, "compute", 1.0),
        Job("c", 0, "comm", 5.0, after=(0,)),
        Job("d", 1, "compute", 4.0),
    ]
    assert ends(jobs, loop) == [2, 3, 7, 4]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_delay_keeps_no_resource_busy(loop):
    jobs = [
        Job("a", 0, "comm", 1.0, delay_s=1.0, uses={"link": 1.0}),
        Job("b", 1, "comm", 1.0, uses={"link": 1.0}),
    ]
    assert ends(jobs, loop) == [2, 1]


@pytest.mark.parametrize("loop", LOOPS)
def test_two_on_one_link_take_twice_as_long_until_one_is_done(loop):
    jobs = [
        Job("short", 0, "comm", 1.0, uses={"link": 1.0}),
        Job("long", 1, "comm", 3.0, uses={"link": 1.0}),
        Job("elsewhere", 2, "comm", 3.0, uses={"other": 1.0}),
    ]
    assert ends(jobs, loop) == pytest.approx([2, 4, 3])


@pytest.mark.parametrize("loop", LOOPS)
def test_who_is_held_up_elsewhere_leaves_its_share_to_others(loop):
    # Three share link A, so two thirds of B are free for the fourth.
    jobs = [
        Job("a", 0, "x", 1.0, uses={"A": 1.0}),
        Job("b", 1, "x", 1.0, uses={"A": 1.0}),
        Job("both", 2, "x", 1.0, uses={"A": 1.0, "B": 1.0}),
        Job("d", 3, "x", 2.0, uses={"B": 1.0}),
    ]
    assert ends(jobs, loop) == pytest.approx([3, 3, 3, 3])


@pytest.mark.parametrize("loop", LOOPS)
def test_work_of_nothing_ends_at_once_and_lets_others_start(loop):
    jobs = [Job("nothing", 0, "x", 0.0), Job("join", 0, "x", 0.0), Job("work", 0, "x", 1.5)]
    assert ends(jobs, loop) == [0, 0, 1.5]


def test_nothing_to_do_takes_no_time():
    assert run(tasks_of([])).seconds == 0


def test_a_job_may_only_wait_for_earlier_ones():
    with pytest.raises(ScheduleError, match="job 0"):
        tasks_of([Job("a", 0, "x", 1.0, after=(0,))])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_circle_of_waits_is_an_error(loop):
    one = tasks_of([Job("a", 0, "x", 1.0), Job("b", 0, "x", 1.0)])
    tangled = Tasks(
        one.delay_s, one.work_s, one.resource, one.load, np.array([0, 1]), np.array([1, 0]), 0
    )
    with pytest.raises(ScheduleError, match="wait in a circle"):
        loop(tangled)


def test_an_endless_run_is_given_up(monkeypatch):
    monkeypatch.setattr(engine, "MOST_EVENTS", 5)
    with pytest.raises(StrettoError, match="given up after 5 events"):
        run(tasks_of([Job("a", 0, "x", 1.0) for _ in range(10)]))


def test_many_resources_with_little_under_way_are_run_task_by_task(monkeypatch):
    monkeypatch.setattr(engine, "PATIENCE", 2)
    jobs = [Job("a", r, "x", 1.0 + r, uses={f"link {r}": 1.0}) for r in range(100)]
    assert ends(jobs) == [1.0 + r for r in range(100)]


def test_a_time_line_has_a_span_for_every_job():
    jobs = [Job("a", 1, "compute", 2.0), Job("b", 0, "comm", 1.0, after=(0,))]
    first, second = timelines_of(jobs, run(tasks_of(jobs)))
    assert (first.rank, second.rank) == (0, 1)
    assert [(s.name, s.lane, s.start_s, s.end_s) for s in first.spans] == [("b", "comm", 2, 3)]


def test_a_resource_is_busy_as_long_as_it_works():
    jobs = [Job("a", r, "x", 3.0, uses={"pool": 0.5}) for r in range(2)]
    assert tasks_of(jobs).busy_s.tolist() == [3.0]


uses = st.lists(
    st.dictionaries(st.integers(0, 5), st.floats(0.05, 2.0), max_size=3), min_size=1, max_size=12
)


def speeds_both_ways(uses):
    few = fair_speeds_of_few([tuple(used.items()) for used in uses])
    resource, load = np.zeros((len(uses), 3), dtype=np.int64), np.zeros((len(uses), 3))
    for task, used in enumerate(uses):
        for place, (name, share) in enumerate(used.items()):
            resource[task, place], load[task, place] = name, share
    return few, fair_speeds(resource, load, np.ones(len(uses)), 6).tolist()


@given(uses)
def test_speeds_are_the_same_for_few_and_for_many(uses):
    few, many = speeds_both_ways(uses)
    assert few == pytest.approx(many, rel=1e-9)


@given(uses)
def test_nobody_can_go_faster_without_making_somebody_slower_go_slower_still(uses):
    speed, _ = speeds_both_ways(uses)
    taken = {r: sum(s * u.get(r, 0) for s, u in zip(speed, uses, strict=True)) for r in range(6)}
    assert all(total <= 1 + 1e-9 for total in taken.values())
    for mine, used in zip(speed, uses, strict=True):
        held = [
            r
            for r in used
            if taken[r] >= 1 - 1e-9
            and all(s <= mine * (1 + 1e-9) for s, u in zip(speed, uses, strict=True) if r in u)
        ]
        assert mine == 1 or held
