"""Ratios of groups: LARS on models of their own, with norms of a group's mean, against NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import RecordingTransport, run_threads
from stretto.config import load
from stretto.errors import ConfigError
from stretto.optim import LARSConfig, local_norms, make_optimizer
from stretto.optim.layer_optimizer import NormSharing
from stretto.run import RunConfig, assemble, prepare
from stretto.strategies import CrossoverConfig, build_strategy
from stretto.strategies.group_trust_ratios import GroupTrustRatioNorms
from stretto.train.loop import train
from tests.laws.test_gossip import (
    CUTS,
    LR,
    SAMPLES,
    STEPS,
    WORKERS,
    Chain,
    Workers,
    assert_same,
    batches,
    gradients,
    mixed,
    seen,
)

GOSSIP = CrossoverConfig(**CUTS, seed=5)
OPTIM = LARSConfig(lr=LR, momentum=0.8, trust=0.3, eps=1e-3, weight_decay=0.05)
"""An eps that is felt."""


def idle(step, rank):
    """Say whether a worker has no samples in a step; in some steps a whole group has none."""
    return (step % 5 == 2 and rank == 1) or (step % 7 == 3 and rank in (2, 3))


class Shift(nn.Module):
    """A bias, which has no ratio, and counts for nothing."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x):
        return x + self.bias - self.bias.detach()


class Shifted(Chain):
    def __init__(self):
        super().__init__()
        self.third = Shift()

    def forward(self, x):
        return self.third(super().forward(x))


def trained(sharing, *, reads):
    inputs, targets = batches()

    def on_rank(transport):
        strategy = build_strategy(GOSSIP, transport, calls=("first", "second"))
        strategy.reads_gradients = reads
        norms = GroupTrustRatioNorms(strategy, transport, sharing)
        making = norms.with_trust_ratio_norms(make_optimizer(OPTIM, norms=norms))
        model, optimizer = strategy.attach(Shifted(), making)
        history = []
        for step in range(STEPS):
            strategy.begin(step, 0, True, LR)
            if not idle(step, transport.rank):
                x, y = (torch.from_numpy(a[step, transport.rank]) for a in (inputs, targets))
                loss = (model(x) - y).square().sum() / 2
                (loss / (SAMPLES * WORKERS)).backward()
            if not strategy.after_backward().is_applied:
                optimizer.step()
                optimizer.zero_grad()
            strategy.after_update()
            history.append(seen(model))
        strategy.close()
        return history

    return run_threads(WORKERS, on_rank)


def lars(workers, step, width):
    """Take a step of LARS, a layer's norms being those of the mean over ``width`` in a row."""
    found = [
        [np.zeros_like(w) for w in x]
        if idle(step, rank)
        else gradients(x, workers.inputs[step, rank], workers.targets[step, rank])
        for rank, x in enumerate(workers.x)
    ]
    before = workers.copy()
    for rank in range(WORKERS):
        group = slice(rank - rank % width, rank - rank % width + width)
        for layer in range(2):
            if idle(step, rank):
                continue
            weight = np.linalg.norm(np.mean([x[layer] for x in before[group]], axis=0))
            gradient = np.linalg.norm(np.mean([g[layer] for g in found[group]], axis=0))
            decay = OPTIM.weight_decay
            ratio = OPTIM.trust * weight / (gradient + decay * weight + OPTIM.eps)
            direction = found[rank][layer] + decay * before[rank][layer]
            v = OPTIM.momentum * workers.u[rank][layer] + LR * ratio * direction
            workers.u[rank][layer] = v
            workers.x[rank][layer] = before[rank][layer] - v


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(("width", "from_step"), [(1, 0), (2, 0), (2, 8), (4, 0), (4, STEPS)])
def test_norms_are_of_the_groups_mean_from_a_step_on(width, from_step, reads):
    workers, expected = Workers(), []
    for step in range(STEPS):
        lars(workers, step, width if step >= from_step else 1)
        workers.x = mixed(workers.x, GOSSIP.build_topology(), step)
        expected.append(workers.copy())
    assert_same(trained(NormSharing(width, from_step), reads=reads), expected)


def test_groups_do_change_the_steps():
    own, groups = (trained(NormSharing(width, 0), reads=False)[0][-1] for width in (1, 2))
    assert np.abs(own[0] - groups[0]).max() > 1e-3


SETTINGS = [
    *("data.samples=24", "data.test_samples=8", "data.size=8", "model.width=4", "train.batch=12"),
    *("optim.kind=lars", "optim.lr=0.5", "optim.momentum=0.9", "train.epochs=2"),
]


def on_four(folder, *settings):
    """Train as four ranks; return of each the parts, and the messages that it sent."""

    def on_rank(transport):
        recording = RecordingTransport(transport)
        loaded = load(RunConfig, None, [*SETTINGS, f"run.folder={folder}", *settings])
        world = World(transport.rank, Mesh((4,)))
        parts = assemble(loaded, prepare(loaded.config), world, recording, lambda event: None)
        train(parts)
        parts.strategy.close()
        return parts, recording

    return run_threads(4, on_rank)


def weights(parts):
    return torch.cat([p.detach().flatten() for p in parts.model.parameters()])


@pytest.mark.parametrize("kind", ["allreduce", "sharded"])
def test_where_all_have_one_model_a_groups_norms_are_everybodys_and_nothing_is_sent(kind, tmp_path):
    plain = on_four(tmp_path / "plain", f"strategy.kind={kind}")
    shared = on_four(tmp_path / "shared", f"strategy.kind={kind}", "optim.norm_group=2")
    for (one, said), (other, also_said) in zip(plain, shared, strict=True):
        assert torch.equal(weights(one), weights(other))
        assert sorted(map(str, also_said.sent)) == sorted(map(str, said.sent))
    assert kind == "sharded" or shared[0][0].optimizer.norms is local_norms


@pytest.mark.parametrize("kind", ["crossover", "sgp", "local_sgd", "diloco", "noloco"])
def test_models_of_their_own_share_norms_whatever_holds_them_together(kind, tmp_path):
    settings = [f"strategy.kind={kind}", "optim.norm_group=2", "optim.norm_group_from_epoch=1"]
    for parts, _ in on_four(tmp_path, *settings):
        assert bool(torch.isfinite(weights(parts)).all())
        assert isinstance(parts.optimizer.norms, GroupTrustRatioNorms)
        assert not parts.notes


@pytest.mark.parametrize(
    "more", [[], ["strategy.delay=1"], ["strategy.mix=gradients", "strategy.every=2"]]
)
def test_those_of_ranks_that_have_one_model_are_that_models(more, tmp_path):
    groups = ["strategy.kind=crossover", "strategy.groups=2", *more]
    plain = on_four(tmp_path / "plain", *groups)
    shared = on_four(tmp_path / "shared", *groups, "optim.norm_group=2")
    wider = on_four(tmp_path / "wider", *groups, "optim.norm_group=4")
    for (one, _), (same, _), (other, _) in zip(plain, shared, wider, strict=True):
        torch.testing.assert_close(weights(same), weights(one), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(weights(other), weights(one), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [[], ["train.clip_norm=1000"]])
@pytest.mark.parametrize("width", [2, 4])
def test_sharing_sends_weights_and_gradients_around_the_group_in_every_step(width, clip, tmp_path):
    gossip = ["strategy.kind=crossover", *clip]
    plain = on_four(tmp_path / "plain", *gossip)
    shared = on_four(tmp_path / "shared", *gossip, f"optim.norm_group={width}")
    adapted = [p for p in plain[0][0].model.parameters() if p.dim() > 1]
    both = 2 * sum(p.nbytes for p in adapted)
    for (parts, said), (_, also_said) in zip(plain, shared, strict=True):
        more = to_peers(also_said) - to_peers(said)
        # A chunk is one of ``width``: rounded up or down, a few elements in a message.
        expected_bytes = parts.total_steps * both * 2 * (width - 1) / width
        assert more == pytest.approx(expected_bytes, rel=0.05)


def to_peers(recording):
    return sum(message.num_bytes for message in recording.sent if message.peer >= 0)


def test_that_norms_are_never_shared_is_said(tmp_path):
    settings = ["strategy.kind=crossover", "optim.norm_group=2", "optim.norm_group_from_epoch=200"]
    for parts, _ in on_four(tmp_path, *settings):
        (note,) = parts.notes
        assert "is never active" in note
        assert "is step 400, and the run ends after 4 steps" in note


@pytest.mark.parametrize("kind", ["allreduce", "crossover"])
def test_groups_that_the_ranks_cannot_be_are_told_those_that_they_can(kind, tmp_path):
    with pytest.raises(ConfigError, match=r"norm_group = 3: 4 ranks can be .* of 1, 2 or 4$"):
        on_four(tmp_path, f"strategy.kind={kind}", "optim.norm_group=3")


def test_a_beginning_without_groups_is_refused():
    with pytest.raises(ConfigError, match="set norm_group, or leave"):
        load(RunConfig, None, ["optim.kind=lars", "optim.norm_group_from_epoch=3"])


def test_ranks_that_wait_for_nobody_share_no_norms(tmp_path):
    with pytest.raises(ConfigError, match="ranks of adpsgd wait for nobody's step"):
        on_four(tmp_path, "strategy.kind=adpsgd", "optim.norm_group=2")
