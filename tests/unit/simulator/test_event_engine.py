"""The event engine: start and end times of tasks on shared resources."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import ScheduleError, StrettoError
from stretto.simulator import event_engine
from stretto.simulator.event_engine import (
    fair_speeds,
    fair_speeds_of_few,
    run,
    run_task_by_task,
    run_vectorized,
)
from stretto.simulator.tasks import Job, Tasks, tasks_of, timelines_of

LOOPS = [run, run_task_by_task, run_vectorized]


def ends(jobs, loop=run):
    return loop(tasks_of(jobs)).end_s.tolist()


@pytest.mark.parametrize("loop", LOOPS)
def test_jobs_of_a_lane_run_in_order_and_lanes_run_concurrently(loop):
    jobs = [
        Job("a", 0, "compute", 2.0),
        Job("b", 0, "compute", 1.0),
        Job("c", 0, "comm", 5.0, after=(0,)),
        Job("d", 1, "compute", 4.0),
    ]
    assert ends(jobs, loop) == [2, 3, 7, 4]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_delay_uses_no_resource(loop):
    jobs = [
        Job("a", 0, "comm", 1.0, delay_s=1.0, uses={"link": 1.0}),
        Job("b", 1, "comm", 1.0, uses={"link": 1.0}),
    ]
    assert ends(jobs, loop) == [2, 1]


@pytest.mark.parametrize("loop", LOOPS)
def test_two_jobs_on_one_link_run_at_half_speed_until_one_is_done(loop):
    jobs = [
        Job("short", 0, "comm", 1.0, uses={"link": 1.0}),
        Job("long", 1, "comm", 3.0, uses={"link": 1.0}),
        Job("elsewhere", 2, "comm", 3.0, uses={"other": 1.0}),
    ]
    assert ends(jobs, loop) == pytest.approx([2, 4, 3])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_job_limited_by_one_resource_leaves_capacity_of_another(loop):
    # Three jobs share A, so two thirds of B are free for the fourth.
    jobs = [
        Job("a", 0, "x", 1.0, uses={"A": 1.0}),
        Job("b", 1, "x", 1.0, uses={"A": 1.0}),
        Job("both", 2, "x", 1.0, uses={"A": 1.0, "B": 1.0}),
        Job("d", 3, "x", 2.0, uses={"B": 1.0}),
    ]
    assert ends(jobs, loop) == pytest.approx([3, 3, 3, 3])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_job_without_work_ends_at_once_and_starts_its_successors(loop):
    jobs = [Job("nothing", 0, "x", 0.0), Job("join", 0, "x", 0.0), Job("work", 0, "x", 1.5)]
    assert ends(jobs, loop) == [0, 0, 1.5]


def test_no_jobs_take_no_time():
    assert run(tasks_of([])).seconds == 0


def test_a_job_may_only_wait_for_earlier_ones():
    with pytest.raises(ScheduleError, match="job 0"):
        tasks_of([Job("a", 0, "x", 1.0, after=(0,))])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_dependency_cycle_is_an_error(loop):
    one = tasks_of([Job("a", 0, "x", 1.0), Job("b", 0, "x", 1.0)])
    cyclic = Tasks(
        one.delay_s, one.work_s, one.resource, one.load, np.array([0, 1]), np.array([1, 0]), 0
    )
    with pytest.raises(ScheduleError, match="they wait for each other"):
        loop(cyclic)


def test_a_simulation_with_too_many_events_is_stopped(monkeypatch):
    monkeypatch.setattr(event_engine, "MAX_EVENTS", 5)
    with pytest.raises(StrettoError, match="stopped after 5 events"):
        run(tasks_of([Job("a", 0, "x", 1.0) for _ in range(10)]))


def test_many_resources_with_few_working_tasks_use_the_task_loop(monkeypatch):
    monkeypatch.setattr(event_engine, "TRIAL_EVENTS", 2)
    jobs = [Job("a", r, "x", 1.0 + r, uses={f"link {r}": 1.0}) for r in range(100)]
    assert ends(jobs) == [1.0 + r for r in range(100)]


def test_a_timeline_has_a_span_for_every_job():
    jobs = [Job("a", 1, "compute", 2.0), Job("b", 0, "comm", 1.0, after=(0,))]
    first, second = timelines_of(jobs, run(tasks_of(jobs)))
    assert (first.rank, second.rank) == (0, 1)
    assert [(s.name, s.lane, s.start_s, s.end_s) for s in first.spans] == [("b", "comm", 2, 3)]


def test_the_busy_time_of_a_resource_adds_up_the_loads():
    jobs = [Job("a", r, "x", 3.0, uses={"pool": 0.5}) for r in range(2)]
    assert tasks_of(jobs).busy_s.tolist() == [3.0]


uses = st.lists(
    st.dictionaries(st.integers(0, 5), st.floats(0.05, 2.0), max_size=3), min_size=1, max_size=12
)


def speeds_both_ways(uses):
    few = fair_speeds_of_few([tuple(used.items()) for used in uses])
    resource, load = np.zeros((len(uses), 3), dtype=np.int64), np.zeros((len(uses), 3))
    for task, used in enumerate(uses):
        for use, (name, share) in enumerate(used.items()):
            resource[task, use], load[task, use] = name, share
    return few, fair_speeds(resource, load, np.ones(len(uses)), 6).tolist()


@given(uses)
def test_both_functions_give_the_same_speeds(uses):
    few, many = speeds_both_ways(uses)
    assert few == pytest.approx(many, rel=1e-9)


@given(uses)
def test_speeds_are_max_min_fair(uses):
    """Every task has full speed, or uses a full resource on which no task is faster."""
    speed, _ = speeds_both_ways(uses)
    taken = {r: sum(s * u.get(r, 0) for s, u in zip(speed, uses, strict=True)) for r in range(6)}
    assert all(total <= 1 + 1e-9 for total in taken.values())
    for own, used in zip(speed, uses, strict=True):
        bottlenecks = [
            r
            for r in used
            if taken[r] >= 1 - 1e-9
            and all(s <= own * (1 + 1e-9) for s, u in zip(speed, uses, strict=True) if r in u)
        ]
        assert own == 1 or bottlenecks
