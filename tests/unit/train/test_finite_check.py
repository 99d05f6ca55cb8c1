"""A step that is not finite on one rank changes no model, and all ranks report the same."""

from dataclasses import replace

import pytest
import torch

from stretto.checkpoint import load_newest
from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import run_threads
from stretto.config import load
from stretto.errors import StrettoError
from stretto.run import RunConfig, assemble, prepare
from stretto.telemetry.events import StepSkipped
from stretto.train.config import TrainConfig
from stretto.train.loop import train
from stretto.train.state import resume_state

SETTINGS = [
    "data.samples=48",
    "data.test_samples=8",
    "data.size=8",
    "model.width=4",
    'model.norm="batch"',
    "train.batch=12",
    "train.log_every=3",
    "train.steps=8",
    "train.save_every=2",
    "optim.lr=0.01",
]
SHARDED = ["strategy.kind=sharded", "strategy.unit=100"]
STRATEGIES = [[], [*SHARDED, "strategy.plan=zero3"], [*SHARDED, "strategy.plan=dear"]]
by_all_strategies = pytest.mark.parametrize(
    "strategy", STRATEGIES, ids=["allreduce", "zero3", "dear"]
)
SIZE, BAD_RANK = 3, 1
NAN = float("nan")


class Run:
    """One training run of ``SIZE`` ranks; some of its steps are not finite on one rank."""

    def __init__(self, folder, *settings, bad_steps=(), spoil="forward", resume=False):
        self.loaded = load(RunConfig, None, [*SETTINGS, f"run.folder={folder}", *settings])
        self.bad_steps, self.spoil, self.resume = bad_steps, spoil, resume
        self.events, self.models, self.scales = [], [None] * SIZE, [None] * SIZE
        self.said = run_threads(SIZE, self._on_rank)

    def _on_rank(self, transport):
        parts = self._parts(transport)
        try:
            train(parts, resume_state(parts, log=pytest.fail) if self.resume else 0)
        except StrettoError as failure:
            return str(failure)
        finally:
            parts.strategy.close()
            self.models[transport.rank] = parts.model
            self.scales[transport.rank] = parts.loss_scale
        return ""

    def _parts(self, transport):
        world = World(transport.rank, Mesh((SIZE,)))
        report = self.events.append if transport.rank == 0 else lambda _event: None
        parts = assemble(self.loaded, prepare(self.loaded.config), world, transport, report)
        now = {"step": -1}
        rate_at = parts.rate_at
        if transport.rank == BAD_RANK:
            _spoil(parts.model, self.spoil, lambda: now["step"] in self.bad_steps)
        return replace(parts, rate_at=lambda step: now.update(step=step) or rate_at(step))

    @property
    def skipped_steps(self):
        return [(e.step, e.reason) for e in self.events if isinstance(e, StepSkipped)]

    def weights(self, rank=0):
        return torch.cat([p.detach().flatten() for p in self.models[rank].parameters()])

    def check_equal_and_finite(self):
        assert all(torch.equal(self.weights(rank), self.weights()) for rank in range(SIZE))
        for model in self.models:
            assert all(bool(torch.isfinite(t).all()) for t in model.state_dict().values())


def _spoil(model, where, now):
    layer = model.blocks[1][0]
    if where == "forward":
        layer.register_forward_hook(
            lambda module, _inputs, output: output * NAN if now() and module.training else None
        )
    else:
        layer.weight.register_hook(lambda grad: grad * float("inf") if now() else grad)


@by_all_strategies
def test_by_default_the_run_ends_and_every_rank_names_the_same_layer_and_step(strategy, tmp_path):
    run = Run(tmp_path / "bad", *strategy, bad_steps=[5])
    assert len(set(run.said)) == 1
    assert "step 6 is not finite: rank 1: layer blocks.1.0 (Conv2d)" in run.said[0]
    run.check_equal_and_finite()
    # Nothing is lost: the five good steps were saved.
    saved = load_newest(tmp_path / "bad" / "run" / "checkpoints", log=pytest.fail)
    assert saved.step == 5
    good = Run(tmp_path / "good", *strategy, "train.steps=5")
    assert torch.equal(run.weights(), good.weights())


@by_all_strategies
@pytest.mark.parametrize("spoil", ["forward", "backward"])
def test_with_skip_all_ranks_skip_the_step(spoil, strategy, tmp_path):
    run = Run(tmp_path, *strategy, 'train.not_finite="skip"', bad_steps=[5], spoil=spoil)
    assert run.said == [""] * SIZE
    run.check_equal_and_finite()
    ((step, reason),) = run.skipped_steps
    assert step == 6
    where = "rank 1: layer blocks.1.0 (Conv2d)" if spoil == "forward" else "the gradient of "
    assert where in reason


@by_all_strategies
def test_after_a_rollback_the_step_is_skipped(strategy, tmp_path):
    skipped = Run(tmp_path / "skip", *strategy, 'train.not_finite="skip"', bad_steps=[5])
    rolled = Run(tmp_path / "back", *strategy, 'train.not_finite="rollback"', bad_steps=[5])
    assert rolled.said == [""] * SIZE
    assert "back to the checkpoint of step 4" in rolled.skipped_steps[0][1]
    # Steps are functions of their number, so the result equals that of a run that skips.
    assert torch.equal(rolled.weights(), skipped.weights())


def test_a_rollback_without_a_checkpoint_ends_the_run(tmp_path):
    run = Run(tmp_path, 'train.not_finite="rollback"', bad_steps=[1])
    assert len(set(run.said)) == 1
    assert "no checkpoint to go back to" in run.said[0]


def test_too_many_skipped_steps_end_the_run(tmp_path):
    limit = ['train.not_finite="skip"', "train.not_finite_limit=2"]
    run = Run(tmp_path, *limit, bad_steps=range(3, 8))
    assert [step for step, _ in run.skipped_steps] == [4, 5]
    assert "step 6 is not finite (3 such steps)" in run.said[0]


@by_all_strategies
def test_an_overflow_of_fp16_on_one_rank_skips_the_step_on_all(strategy, tmp_path):
    run = Run(
        tmp_path / "fp16", *strategy, 'train.precision="fp16"', bad_steps=[5], spoil="backward"
    )
    assert run.said == [""] * SIZE
    assert run.skipped_steps == [(6, "overflow at a loss scale of 65536, now 32768")]
    assert [loss_scale.value for loss_scale in run.scales] == [32768.0] * SIZE
    assert [loss_scale.good_steps for loss_scale in run.scales] == [2] * SIZE  # of 8, the last two
    run.check_equal_and_finite()


def test_gradients_are_divided_by_the_loss_scale(tmp_path):
    begin = Run(tmp_path / "begin", "train.steps=1", "optim.lr=1e-30").weights()
    full = Run(tmp_path / "fp32").weights()
    half = Run(tmp_path / "fp16", 'train.precision="fp16"', "train.loss_scale=1024").weights()
    # 11 bits are enough for the way that fp32 goes; a scale that stays would change its length.
    assert float((half - full).norm()) < 0.05 * float((full - begin).norm())


def test_a_loss_scale_that_is_too_large_is_halved_until_it_fits_and_is_saved(tmp_path):
    settings = ['train.precision="fp16"', f"train.loss_scale={2.0**21}"]
    run = Run(tmp_path, *settings)
    assert len(run.skipped_steps) >= 2
    loss_scale = run.scales[0].value
    assert loss_scale == 2.0**21 / 2 ** len(run.skipped_steps)
    resumed = Run(tmp_path, *settings, "train.steps=10", resume=True)
    assert not resumed.skipped_steps
    assert resumed.scales[0].value == loss_scale


def test_a_loss_that_is_not_finite_is_no_overflow_in_fp16(tmp_path):
    run = Run(tmp_path, 'train.precision="fp16"', bad_steps=[5])
    assert len(set(run.said)) == 1
    assert "step 6 is not finite: rank 1: layer blocks.1.0 (Conv2d)" in run.said[0]
    assert not run.skipped_steps


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_the_residual_of_a_sparse_codec_is_restored(policy, tmp_path):
    wire = ["strategy.wire=topk 10%", "strategy.algorithm=ring"]
    run = Run(tmp_path, f'train.not_finite="{policy}"', *wire, bad_steps=[5])
    assert run.said == [""] * SIZE
    assert len(run.skipped_steps) == 1
    run.check_equal_and_finite()


def test_the_checkpoint_of_a_run_that_stopped_can_be_resumed(tmp_path):
    wire = ["strategy.wire=topk 10%", "strategy.algorithm=ring"]
    assert "not finite" in Run(tmp_path, *wire, bad_steps=[5]).said[0]
    resumed = Run(tmp_path, *wire, resume=True)
    assert resumed.said == [""] * SIZE
    resumed.check_equal_and_finite()


@pytest.mark.parametrize("bad_step", [0, 4])
def test_a_run_may_stop_in_its_first_step_or_right_after_a_save(bad_step, tmp_path):
    run = Run(tmp_path, bad_steps=[bad_step])
    assert f"step {bad_step + 1} is not finite" in run.said[0]
    folder = tmp_path / "run" / "checkpoints"
    saved = sorted(path.name for path in folder.glob("step-*"))
    assert saved == ([] if bad_step == 0 else ["step-00000002", "step-00000004"])


def test_a_smaller_last_step_has_smaller_micro_batches(tmp_path):
    # 51 samples in steps of 12: ranks have one sample each in the last step.
    settings = ["data.samples=51", "train.micro_batch=2", "train.steps=5", "data.size=16"]
    assert Run(tmp_path, *settings).said == [""] * SIZE


@pytest.mark.parametrize(
    ("num_samples", "sizes"),
    [(16, [2] * 8), (15, [2] * 7 + [1]), (3, [0] * 6 + [2, 1]), (2, [0] * 7 + [2]), (0, [0] * 8)],
)
def test_all_ranks_have_equally_many_micro_batches_of_the_largest_size(num_samples, sizes):
    config = TrainConfig(batch=48, micro_batch=2)
    assert config.micro_batch_sizes(num_samples, ranks=3) == sizes


def test_accumulation_splits_the_samples_of_a_rank():
    assert TrainConfig(batch=12, accumulation=4).micro_batch_sizes(6, ranks=2) == [2, 2, 1, 1]
