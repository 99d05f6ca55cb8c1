"""What a sharded strategy cannot do is refused by name, before it does something else."""

import pytest
import torch
from torch import nn

from stretto.cluster.world import Mesh
from stretto.comm.in_process_transports import run_threads
from stretto.config import load
from stretto.errors import ConfigError, StrettoError
from stretto.planner.presets import UnitShape, preset_plan
from stretto.run import RunConfig
from stretto.strategies.sharded.config import ShardedConfig, checked_plan
from stretto.strategies.sharded.sharded import Sharded

pytestmark = pytest.mark.usefixtures("kept_solvers")


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def train(strategy, model, step=0):
    """Take one step; the strategy is attached."""
    strategy.begin(step, 0, True, 0.1)
    model(torch.ones(2, 4)).sum().backward()
    strategy.after_backward()
    strategy.after_update()


def on_ranks(work, ranks=2, model=mlp, optimizer=sgd, **config):
    """Let each rank attach a model, and do ``work`` with the strategy and it."""
    config = {"unit": 0, "plan": "zero2", **config}

    def attached(transport):
        strategy = Sharded(ShardedConfig(**config), transport)
        try:
            mine, _ = strategy.attach(model(), optimizer)
            return work(strategy, mine)
        finally:
            strategy.close()

    return run_threads(ranks, attached, timeout_s=20)


def nothing(strategy, model):
    pass


@pytest.mark.parametrize("plan", ["ddp", "zero2", "zero3"])
def test_a_model_that_is_cut_up_is_not_called_without_gradients(plan):
    def work(strategy, model):
        train(strategy, model)
        with torch.no_grad(), pytest.raises(StrettoError, match="sharded, and was called without"):
            model(torch.ones(1, 4))
        strategy.consolidate()
        with torch.no_grad():
            return model(torch.ones(1, 4))

    first, second = on_ranks(work, plan=plan)
    assert torch.equal(first, second)


def test_a_model_that_is_cut_up_neither_tells_its_state_nor_takes_one():
    def work(strategy, model):
        state = model.state_dict()  # nothing has been cut up yet
        train(strategy, model)
        with pytest.raises(
            StrettoError, match=r"sharded: consolidate it .* before its state is read"
        ):
            model.state_dict()
        with pytest.raises(StrettoError, match="consolidate it"):
            model.load_state_dict(state)
        strategy.consolidate()
        model.load_state_dict(model.state_dict())
        train(strategy, model, 1)

    on_ranks(work)


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (torch.optim.LBFGS, "LBFGS reads whole tensors"),
        (torch.optim.Adagrad, "Adagrad has state before its first step"),
    ],
)
def test_an_optimizer_that_cannot_work_on_pieces_is_refused(optimizer, reason):
    with pytest.raises(ConfigError, match=rf"{reason}.*allreduce"):
        on_ranks(nothing, ranks=1, optimizer=optimizer)


def test_what_is_trainable_must_be_in_the_optimizer():
    def most(parameters):
        return sgd(list(parameters)[:-1])

    reason = r"a parameter of shape \[2\] is trainable but not in the optimizer: freeze it"
    with pytest.raises(ConfigError, match=reason):
        on_ranks(nothing, ranks=1, optimizer=most)


class Twice(nn.Module):
    """The first of three layers is used again by the second."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.three(self.one(self.two(self.one(x))))


def test_a_unit_that_zero3_has_resharded_is_not_used_again():
    def work(strategy, model):
        reason = r'unit 0 \(one\) is used again after its forward.*strategy\.plan = "zero2"'
        with pytest.raises(StrettoError, match=reason):
            train(strategy, model)

    on_ranks(work, ranks=1, model=Twice, plan="zero3")


def test_with_zero2_a_unit_may_be_used_again():
    on_ranks(train, model=Twice, plan="zero2")


class Reading(nn.Module):
    """The second of three layers is never called; its weight is read."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.three(self.one(x) @ self.two.weight)


def test_a_unit_that_is_only_read_is_named_where_nobody_waited_for_it():
    def work(strategy, model):
        with pytest.raises(
            StrettoError, match=r"unit 1 \(two\) has a gradient, but its module was"
        ):
            train(strategy, model)

    on_ranks(work, ranks=1, model=Reading, plan="dear")


def test_ranks_with_different_plans_are_told_which():
    def work(transport):
        plan = "zero3" if transport.rank == 2 else "zero2"
        strategy = Sharded(ShardedConfig(plan=plan, unit=0), transport)
        reason = "rank 2 has another plan than rank 0 .* same model, optimizer and strategy"
        with pytest.raises(ConfigError, match=reason):
            strategy.attach(mlp(), sgd)

    run_threads(3, work)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("zero4", r"strategy\.plan = 'zero4': known are ddp, zero1, zero2, zero3, dear, random"),
        ("random x", r"strategy\.plan = 'random x': known are"),
        ("zero2 5", r"strategy\.plan = 'zero2 5': known are"),
        ("nowhere.json", r"cannot read the plan nowhere\.json: No such file"),
    ],
)
def test_a_plan_that_is_not_known_is_answered_with_those_that_are(plan, reason):
    with pytest.raises(ConfigError, match=reason):
        checked_plan(ShardedConfig(plan=plan), mlp())


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ([UnitShape("0", 40)], r"a plan for 1 units, the model has 3; make it anew"),
        (
            [UnitShape("0", 40), UnitShape("2", 71), UnitShape("3", 18)],
            r"a plan for 3 units, the model has 3: \('2', 71\) there, \('2', 72\) here",
        ),
    ],
)
def test_a_plan_of_another_model_is_refused(shapes, reason, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(preset_plan("zero2", shapes).to_json())
    with pytest.raises(ConfigError, match=rf"other\.json is {reason}"):
        checked_plan(ShardedConfig(plan=str(path), unit=0), mlp())


def test_a_plan_from_a_file_is_the_one_that_is_run(tmp_path):
    config = ShardedConfig(plan="zero3", prefetch=0, unit=0)
    path = tmp_path / "plan.json"
    path.write_text(checked_plan(config, mlp()).to_json())

    def work(strategy, model):
        train(strategy, model)
        return strategy.plan.digest()

    assert on_ranks(work, plan=str(path)) == [checked_plan(config, mlp()).digest()] * 2


def test_units_are_shared_out_in_hosts_of_equal_size_only():
    with pytest.raises(ConfigError, match=r"strategy\.in_host: hosts have 2, 1 ranks"):
        on_ranks(nothing, ranks=Mesh((2, 1)), in_host=True)


@pytest.mark.parametrize(
    ("word", "why"),
    [("ring/3", "1, 2, 4, 8 or 16 parts"), ("rnig", 'did you mean "ring"'), ("halving", "known")],
)
def test_an_algorithm_that_cannot_be_is_refused_before_anything_starts(word, why):
    settings = ["strategy.kind=sharded", f"strategy.algorithm={word}"]
    with pytest.raises(ConfigError, match=rf"strategy\.algorithm.*{why}"):
        load(RunConfig, None, settings)


def test_two_parameters_in_one_memory_are_refused():
    def sharing():
        model = mlp()
        model[3].weight = nn.Parameter(model[2].weight.detach()[:2])
        return model

    with pytest.raises(ConfigError, match=r"3\.weight and 2\.weight share memory .* one nn\.Param"):
        on_ranks(nothing, ranks=1, model=sharing)


def test_a_parameter_that_was_replaced_or_moved_is_named():
    def replaced(strategy, model):
        train(strategy, model)
        model[2].bias = nn.Parameter(torch.zeros(8))
        with pytest.raises(StrettoError, match=r"parameter 2\.bias was replaced"):
            train(strategy, model, 1)

    def moved(strategy, model):
        model[0].weight.data = torch.zeros(8, 4)
        with pytest.raises(StrettoError, match=r"parameter 0\.weight was given other memory"):
            train(strategy, model)

    on_ranks(replaced, ranks=1)
    on_ranks(moved, ranks=1, plan="dear")
