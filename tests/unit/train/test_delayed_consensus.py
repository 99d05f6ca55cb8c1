"""Local steps: no rank waits for the slowest within some steps, and all end after the same one."""

import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

from stretto.checkpoint import load_newest
from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import run_threads
from stretto.config import load
from stretto.errors import StrettoError
from stretto.run import RunConfig, assemble, prepare
from stretto.telemetry.events import EvalDone, RunEnded, StepDone, StepSkipped
from stretto.train.loop import train
from stretto.train.state import resume_state
from stretto.train.step_consensus import LAG, ControlPlane, DelayedConsensus, SkippedStep

SIZE, BAD_RANK, STEPS = 3, 1, 20
SETTINGS = [
    "data.samples=400",
    "data.test_samples=8",
    "data.size=8",
    "model.width=4",
    'model.norm="batch"',
    "train.batch=12",
    "train.log_every=3",
    f"train.steps={STEPS}",
    "train.save_every=12",
    "train.eval_every=1000",
    "optim.lr=0.01",
]
KINDS = {
    "crossover": ["strategy.kind=crossover"],
    "late": ["strategy.kind=sgp", "strategy.delay=1"],
    "local": ["strategy.kind=diloco", "strategy.every=4", "strategy.delay=1"],
    "pairs": ["strategy.kind=noloco", "strategy.every=2"],
    "adpsgd": ["strategy.kind=adpsgd"],
    "seldom": ["strategy.kind=local_sgd", "strategy.every=1000"],
}
by_all_kinds = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "seldom"])


def of_kind(kind):
    return KINDS[kind]


def consensus_of(transport, stop_signal=lambda: None):
    return DelayedConsensus(
        ControlPlane(transport, stop_signal), expected_samples=lambda step: 10 + step
    )


def test_a_rank_continues_until_it_is_lag_steps_ahead():
    began = [0, 0]
    held = threading.Event()

    def work(transport):
        consensus = consensus_of(transport)
        for step in range(LAG + 3):
            if transport.rank == 1 and step == 2:
                assert held.wait(10), "the other rank was to run ahead"
                time.sleep(0.05)
                most = began[0]
            consensus.begin(step, 1)
            assert consensus.result().num_samples == 10 + step
            began[transport.rank] = step + 1
            if transport.rank == 0 and step == LAG + 1:
                held.set()
        return most if transport.rank == 1 else None

    # Rank 1 has begun steps 0 and 1, so rank 0 waits in the step that is LAG after step 1.
    assert run_threads(2, work)[1] == LAG + 2


@pytest.mark.parametrize("asked", [0, 2])
def test_a_stop_request_ends_all_ranks_after_the_same_step(asked):
    def work(transport):
        steps = iter(range(-1, 50))
        now = next(steps)

        def stop_signal():
            return "TERM" if transport.rank == 1 and now >= asked else None

        consensus = consensus_of(transport, stop_signal)
        for now in steps:
            consensus.begin(now, 1)
            consensus.take_skipped_steps(is_sync_point=False)
            if stop_reason := consensus.result().stop_reason:
                return now, stop_reason
        return None

    assert run_threads(3, work) == [(asked + LAG, "stopped by TERM to rank 1")] * 3


def test_at_a_sync_point_all_ranks_know_a_stop_request_at_once():
    def work(transport):
        consensus = consensus_of(transport, lambda: "USR1" if transport.rank else None)
        consensus.begin(0, 1)
        before = consensus.result().stop_reason
        consensus.take_skipped_steps(is_sync_point=True)
        return before, consensus.result().stop_reason

    assert run_threads(2, work) == [("", "stopped by USR1 to rank 1")] * 2


def test_a_skipped_step_is_known_to_all_ranks_once_after_the_same_step():
    def work(transport):
        consensus = consensus_of(transport)
        reported = []
        for step in range(3 * LAG):
            consensus.begin(step, 1)
            if transport.rank == 1 and step in (2, 3):
                consensus.record(SkippedStep(step, f"odd {step}"))
            reported += [
                (step, str(record), record.step)
                for record in consensus.take_skipped_steps(is_sync_point=False)
            ]
        return reported

    # A flag of step 2 is sent with the sum of step 3.
    expected = [(3 + LAG, "rank 1: odd 2", 2), (3 + LAG, "rank 1: odd 3", 3)]
    assert run_threads(2, work) == [expected] * 2


class Run:
    """One run of ``SIZE`` ranks; some of its steps are not finite on one of them."""

    def __init__(self, folder, *settings, bad_steps=(), spoil="forward", resume=False, asked=None):
        self.loaded = load(RunConfig, None, [*SETTINGS, f"run.folder={folder}", *settings])
        self.bad_steps, self.spoil, self.resume, self.asked = bad_steps, spoil, resume, asked
        self.events, self.parts = [], [None] * SIZE
        self.changed, self.now = [Counter() for _ in range(SIZE)], [-1] * SIZE
        self.said = run_threads(SIZE, self._on_rank)

    def _on_rank(self, transport):
        rank = transport.rank
        world = World(rank, Mesh((SIZE,)))
        report = self.events.append if rank == 0 else lambda _event: None
        parts = assemble(self.loaded, prepare(self.loaded.config), world, transport, report)
        rate_at = parts.rate_at
        if rank == BAD_RANK:
            self._spoil(parts.model)
        parts = replace(parts, rate_at=lambda step: self._note_step(rank, step) or rate_at(step))
        parts.optimizer.register_step_post_hook(
            lambda *_: self.changed[rank].update([self.now[rank]])
        )
        self.parts[rank] = parts
        control = ControlPlane(transport, lambda: self.asked if rank == BAD_RANK else None)
        try:
            train(parts, resume_state(parts, log=pytest.fail) if self.resume else 0, control)
        except StrettoError as failure:
            return str(failure)
        finally:
            parts.strategy.close()
        return ""

    def _note_step(self, rank, step):
        self.now[rank] = step

    def _spoil(self, model):
        def now():
            return self.now[BAD_RANK] in self.bad_steps

        layer = model.blocks[1][0]
        nan = float("nan")
        if self.spoil == "forward":
            layer.register_forward_hook(
                lambda module, _, output: output * nan if now() and module.training else None
            )
        else:
            layer.weight.register_hook(lambda grad: grad * nan if now() else grad)

    def events_of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def check_finite(self):
        for parts in self.parts:
            assert all(bool(torch.isfinite(t).all()) for t in parts.model.state_dict().values())


@by_all_kinds
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("forward", "rank 1: layer blocks.1.0 (Conv2d)"),
        ("backward", "rank 1: losses are finite, the gradient of blocks."),
    ],
)
def test_a_rank_skips_its_own_step_only(kind, spoil, reason, tmp_path):
    bad = [5, 6, STEPS - 1]
    run = Run(tmp_path, *of_kind(kind), "train.not_finite=skip", bad_steps=bad, spoil=spoil)
    assert run.said == [""] * SIZE
    run.check_finite()
    steps = Counter(range(STEPS))
    assert run.changed == [steps, steps - Counter(bad), steps]
    reported = run.events_of(StepSkipped)
    assert [event.step for event in reported] == [step + 1 for step in bad]
    assert all(reason in event.reason for event in reported)


COMMON_UPDATES = {
    "gradients": ["strategy.kind=crossover", "strategy.mix=gradients"],
    "norms": ["strategy.kind=crossover", "optim.kind=lars", f"optim.norm_group={SIZE}"],
    "local norms": ["strategy.kind=local_sgd", "optim.kind=lars", f"optim.norm_group={SIZE}"],
}
"""Strategies whose replicas differ, but whose updates need all ranks."""


@pytest.mark.parametrize("way", COMMON_UPDATES)
@pytest.mark.parametrize("spoil", ["forward", "backward"])
def test_ranks_with_common_updates_skip_steps_together(way, spoil, tmp_path):
    more = [*COMMON_UPDATES[way], "train.not_finite=skip"]
    run = Run(tmp_path, *more, bad_steps=[5], spoil=spoil)
    assert run.said == [""] * SIZE
    run.check_finite()
    assert all(5 not in changed and 4 in changed for changed in run.changed)
    (reported,) = run.events_of(StepSkipped)
    assert reported.step == 6


@by_all_kinds
def test_by_default_all_ranks_end_with_the_same_error(kind, tmp_path):
    run = Run(tmp_path, *of_kind(kind), bad_steps=[5])
    assert len(set(run.said)) == 1
    assert "step 6 is not finite: rank 1: layer blocks.1.0 (Conv2d)" in run.said[0]
    run.check_finite()
    # The steps made meanwhile are saved, and the run can be resumed from there.
    saved = load_newest(tmp_path / "run" / "checkpoints", log=pytest.fail)
    assert saved.step == 6 + LAG + 1
    assert Run(tmp_path, *of_kind(kind), resume=True).said == [""] * SIZE


@pytest.mark.parametrize("kind", ["crossover", "adpsgd"])
def test_a_rank_that_keeps_failing_ends_the_run(kind, tmp_path):
    limit = ["train.not_finite=skip", "train.not_finite_limit=2"]
    run = Run(tmp_path, *of_kind(kind), *limit, bad_steps=range(3, STEPS))
    assert len(set(run.said)) == 1
    assert "such steps): rank 1: layer blocks.1.0 (Conv2d)" in run.said[0]


@by_all_kinds
def test_after_a_rollback_the_rank_skips_its_step(kind, tmp_path):
    bad = 13
    run = Run(tmp_path, *of_kind(kind), "train.not_finite=rollback", bad_steps=[bad])
    assert run.said == [""] * SIZE
    (reported,) = run.events_of(StepSkipped)
    assert reported.step == bad + 1
    assert "rank 1: layer blocks.1.0 (Conv2d)" in reported.reason
    assert "back to the checkpoint of step 12" in reported.reason
    run.check_finite()
    # All ranks know of it after the last step; the steps from 12 on are then repeated.
    twice = Counter([*range(STEPS), *range(12, STEPS)])
    assert run.changed == [twice, twice - Counter([bad, bad]), twice]


@pytest.mark.parametrize("kind", ["crossover", "local", "adpsgd"])
def test_an_overflow_of_fp16_affects_one_rank_only(kind, tmp_path):
    half = [*of_kind(kind), "train.precision=fp16"]
    run = Run(tmp_path, *half, bad_steps=[5], spoil="backward")
    assert run.said == [""] * SIZE
    (reported,) = run.events_of(StepSkipped)
    assert reported.reason == "rank 1: overflow at a loss scale of 65536, now 32768"
    assert [parts.loss_scale.value for parts in run.parts] == [65536, 32768, 65536]


@by_all_kinds
def test_all_ranks_stop_after_the_same_step_and_the_run_can_be_resumed(kind, tmp_path):
    run = Run(tmp_path, *of_kind(kind), asked="TERM")
    assert run.said == [""] * SIZE
    (ended,) = run.events_of(RunEnded)
    assert (ended.step, ended.stopped) == (LAG + 1, "stopped by TERM to rank 1")
    assert ended.again
    resumed = Run(tmp_path, *of_kind(kind), resume=True)
    assert resumed.events_of(RunEnded)[0].step == STEPS


def test_log_lines_count_the_samples_of_all_ranks_in_order(tmp_path):
    settings = [*of_kind("adpsgd"), "data.samples=100", "train.steps=18", "train.log_every=2"]
    run = Run(tmp_path, *settings, "train.eval_every=5")
    lines = run.events_of(StepDone)
    assert [line.step for line in lines] == list(range(2, 19, 2))
    seen = [round(line.samples_per_s * line.step_s * 2) for line in lines]
    # Every step has 12 samples, except each ninth, which has 4.
    assert seen == [24, 24, 24, 24, 16, 24, 24, 24, 16]
    steps = [event.step for event in run.events if isinstance(event, StepDone | EvalDone)]
    assert steps == sorted(steps)


@pytest.mark.parametrize("kind", ["adpsgd", "seldom"])
def test_other_ranks_continue_until_they_are_lag_steps_ahead_of_a_slow_one(kind, tmp_path):
    slow, held_in, now = 2, 3, [0] * SIZE
    settings = [*SETTINGS, *of_kind(kind), f"run.folder={tmp_path}", "train.log_every=1"]
    loaded = load(RunConfig, None, [*settings, "train.save_every=1000"])
    changed = threading.Condition()

    def on_rank(transport):
        world = World(transport.rank, Mesh((SIZE,)))
        parts = assemble(loaded, prepare(loaded.config), world, transport, lambda _: None)
        most = []

        def note_step(step):
            with changed:
                now[transport.rank] = step
                changed.notify_all()
                if transport.rank == slow and step == held_in:
                    # They wait before the step that is LAG after the one that is held.
                    far = changed.wait_for(lambda: min(now[:slow]) >= held_in + LAG, 20)
                    assert far, f"others wait at {now}"
                    changed.wait(0.05)
                    most[:] = now[:slow]

        rate_at = parts.rate_at
        train(replace(parts, rate_at=lambda step: note_step(step) or rate_at(step)))
        parts.strategy.close()
        return most

    assert run_threads(SIZE, on_rank)[slow] == [held_in + LAG] * 2
