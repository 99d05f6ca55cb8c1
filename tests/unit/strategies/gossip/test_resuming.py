"""Rounds in flight when a run was saved are restored to the same segments, or refused."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stretto.collectives.codecs import Fp8
from stretto.comm.bound_schedule import BufferPool
from stretto.comm.in_process_transports import run_threads
from stretto.comm.transport import CompletedWork
from stretto.errors import CheckpointError
from stretto.strategies import CrossoverConfig, build_strategy
from stretto.strategies.gossip.coded_wire import CodedDifferenceMixer
from stretto.strategies.gossip.groups import GossipRoute, RankGroup
from stretto.strategies.gossip.mixer import DifferenceMixer, PushSumMixer
from stretto.topology import make_topology


def mixer(kind, *sizes):
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    ring = make_topology("ring")

    def start(_sends, receives, *_):
        for p2p_op in receives:
            p2p_op.tensor.zero_()
        return CompletedWork(0.0)

    silent = SimpleNamespace(start=start)
    route = GossipRoute(RankGroup(count=2, width=1, rank=0), None, silent, lane=1)
    more = {"buffer_pool": BufferPool()} if kind is CodedDifferenceMixer else {}
    travels_as = Fp8() if more else None
    return kind(parameters, travels_as, partial(ring, 0, 2), route, **more)


@pytest.mark.parametrize("kind", [DifferenceMixer, PushSumMixer, CodedDifferenceMixer])
def test_a_round_under_way_is_taken_up_by_the_same_segment(kind):
    one, other = mixer(kind, 3, 2), mixer(kind, 3, 2)
    one.start_round(0)
    other.load(one.state())
    assert other.rounds_in_flight == 1
    assert other.mass == one.mass
    other.load({})
    assert (other.rounds_in_flight, other.mass) == (0, 1.0)


@pytest.mark.parametrize("other", [mixer(DifferenceMixer, 4), mixer(PushSumMixer, 3, 2)])
def test_one_of_another_segment_or_another_way_to_mix_is_refused(other):
    one = mixer(DifferenceMixer, 3, 2)
    one.start_round(0)
    with pytest.raises(CheckpointError, match=r"5 elements.*strategy\.segments back to resume"):
        other.load(one.state())


def begun(transport, groups, state=None, wire="own"):
    """Return a strategy that has taken a step since it began, or since ``state`` was taken up."""
    strategy = build_strategy(CrossoverConfig(groups=groups, delay=1, wire=wire), transport)
    torch.manual_seed(0)
    model, _ = strategy.attach(nn.Linear(3, 2), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    strategy.begin(0, 0, True, 0.1)
    model(torch.full((1, 3), 1.0 + transport.rank)).sum().backward()
    strategy.after_backward()
    strategy.after_update()
    if state is not None:
        strategy.consolidate()
        strategy.load_local_state(state)
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    rounds_in_flight = [mixer.rounds_in_flight for mixer in strategy.inspect().mixers]
    state = strategy.local_state()
    strategy.close()
    return state, own, rounds_in_flight


@pytest.mark.parametrize(("before", "after"), [(None, 2), (2, None), (2, 1), (2, 2)])
def test_models_of_other_groups_are_not_taken_up_all_begin_from_their_mean(before, after):
    def on_rank(transport):
        state, own, _ = begun(transport, before)
        _, again, rounds_in_flight = begun(transport, after, state)
        return own, again, rounds_in_flight

    found = run_threads(4, on_rank)
    first = found[0][1]
    for own, again, rounds_in_flight in found:
        if before == after:
            assert torch.equal(own, again)
            assert all(rounds_in_flight)
        else:
            assert torch.equal(again, first)
            assert not any(rounds_in_flight)


@pytest.mark.parametrize(("before", "after"), [(None, 2), (2, None), (2, 1), (2, 2)])
def test_the_mean_is_the_reference_of_other_groups_with_nothing_left(before, after):
    def on_rank(transport):
        state, _, _ = begun(transport, before, wire="fp8")
        again, own, _ = begun(transport, after, state, wire="fp8")
        return [
            {kind: s[f"segment-0/{kind}"] for kind in ("reference", "residual")}
            for s in (state, again)
        ], own

    width = 4 // (after or 4)
    for rank, ((old, new), own) in enumerate(run_threads(4, on_rank)):
        if before == after:
            assert all(torch.equal(old[kind], new[kind]) for kind in old)
            assert old["residual"].any()
            continue
        mine = own.tensor_split(width)[rank % width]
        assert torch.equal(new["reference"][: len(mine)], mine)
        assert not new["residual"].any()


def test_what_was_saved_before_there_were_groups_is_of_ranks():
    def on_rank(transport):
        state, own, _ = begun(transport, None)
        del state["groups"]
        return own, begun(transport, None, state)[1]

    found = run_threads(2, on_rank)
    assert all(torch.equal(own, again) for own, again in found)
    assert not torch.equal(found[0][0], found[1][0])


def moved(one):
    """Move a segment from its reference by what eight bits cannot say."""
    with torch.no_grad():
        for value in one.values:
            value.copy_(torch.linspace(0.1, 1, value.numel()))
    one.start_round(0)
    return one


def test_the_reference_and_what_was_left_are_taken_up_with_their_bits():
    one, other = moved(mixer(CodedDifferenceMixer, 3, 2)), mixer(CodedDifferenceMixer, 3, 2)
    state = one.state()
    assert torch.equal(state["reference"], torch.zeros(5))
    assert state["residual"].abs().sum() > 0
    other.load(state)
    again = other.state()
    assert {name: t.tolist() for name, t in again.items()} == {
        name: t.tolist() for name, t in state.items()
    }


def test_where_nothing_was_kept_the_model_is_the_reference():
    # It is the mean that all took from the checkpoint, each before its own.
    one = moved(mixer(CodedDifferenceMixer, 3, 2))
    one.load({})
    state = one.state()
    assert torch.equal(state["reference"], torch.cat(one.values))
    assert not state["residual"].any()
    assert one.rounds_in_flight == 0


def test_another_wire_takes_up_the_rounds_and_no_more():
    one, other = moved(mixer(CodedDifferenceMixer, 3, 2)), mixer(DifferenceMixer, 3, 2)
    other.load(one.state())
    assert other.rounds_in_flight == 1
    assert set(other.state()) == {"round-000"}


def test_a_reference_of_another_segment_is_refused():
    one, other = mixer(CodedDifferenceMixer, 3, 2), mixer(CodedDifferenceMixer, 4)
    with pytest.raises(CheckpointError, match=r"reference of 5 elements.*segment of 4"):
        other.load(one.state())


def test_beginning_again_leaves_nothing_under_way_or_left():
    values = [torch.full((3,), 2.0), torch.full((2,), 3.0)]
    coded, pushes = moved(mixer(CodedDifferenceMixer, 3, 2)), moved(mixer(PushSumMixer, 3, 2))
    assert pushes.mass < 1
    for one in (coded, pushes):
        one.reset_to_mean(values)
        assert (one.rounds_in_flight, one.mass) == (0, 1.0)
        assert [v.tolist() for v in one.values] == [v.tolist() for v in values]
    state = coded.state()
    assert torch.equal(state["reference"], torch.cat(values))
    assert not state["residual"].any()
