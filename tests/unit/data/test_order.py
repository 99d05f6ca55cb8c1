import numpy as np
import pytest
from torch.utils.data import DataLoader, TensorDataset

from stretto.data.order import DistributedBatchSampler, rank_samples, samples_at, steps_per_epoch
from stretto.errors import ConfigError

SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 97, 256, 1024, 10_007, 65_536]


def whole_epoch(num_samples, *, seed=0, epoch=0):
    epoch_indices = np.arange(num_samples)
    return samples_at(epoch_indices, num_samples=num_samples, seed=seed, epoch=epoch)


@pytest.mark.parametrize("num_samples", SIZES)
def test_an_epoch_is_a_permutation_of_all_samples(num_samples):
    assert np.array_equal(np.sort(whole_epoch(num_samples)), np.arange(num_samples))


def test_the_order_never_changes_from_one_version_to_the_next():
    # These values must never change: a run resumed under a newer version continues its epoch.
    assert whole_epoch(10).tolist() == [8, 2, 5, 1, 3, 6, 0, 4, 7, 9]
    far = np.array([0, 1, 999_999_999_998])
    found = samples_at(far, num_samples=10**12 - 1, seed=7, epoch=3)
    assert found.tolist() == [979566621718, 634153671559, 869062614862]


def test_a_position_gives_the_same_sample_in_any_batch_of_positions():
    single = [
        samples_at(np.array([p]), num_samples=1000, seed=1, epoch=2).item() for p in range(50)
    ]
    assert single == whole_epoch(1000, seed=1, epoch=2)[:50].tolist()


@pytest.mark.parametrize("other", [{"seed": 1}, {"epoch": 1}, {"seed": -1}])
def test_another_seed_or_epoch_gives_another_order(other):
    agreeing = whole_epoch(10_007) == whole_epoch(10_007, **other)
    # Two unrelated orders agree in 1 place on average, and in over 10 once in 10^8 trials.
    assert agreeing.sum() <= 10


def test_seed_and_epoch_are_not_interchangeable():
    assert not np.array_equal(whole_epoch(97, seed=1), whole_epoch(97, epoch=1))


def test_fixed_points_are_as_rare_as_in_random_permutations():
    fixed = [(whole_epoch(1000, epoch=e) == np.arange(1000)).sum() for e in range(200)]
    # One on average, variance 1: the mean of 200 has a deviation of 0.07.
    assert 0.65 < np.mean(fixed) < 1.35


@pytest.mark.parametrize("lag", [1, 2, 100, 101])
def test_neighbours_are_uncorrelated(lag):
    order = whole_epoch(10_007)
    correlation = np.corrcoef(order[:-lag], order[lag:])[0, 1]
    assert abs(correlation) < 0.04  # four standard deviations of 1/sqrt(N)


def test_every_sample_comes_first_equally_often():
    firsts = [
        samples_at(np.array([0]), num_samples=10, seed=5, epoch=e).item() for e in range(2000)
    ]
    counts = np.bincount(firsts, minlength=10)
    # Chi square with 9 degrees of freedom: above 33.7 once in 10^4.
    assert ((counts - 200) ** 2 / 200).sum() < 33.7


def test_all_orders_of_three_samples_occur_equally_often():
    seen = [tuple(whole_epoch(3, epoch=e).tolist()) for e in range(1200)]
    counts = np.array([seen.count(order) for order in set(seen)])
    assert len(counts) == 6
    assert ((counts - 200) ** 2 / 200).sum() < 25.7  # 5 degrees of freedom, once in 10^4


@pytest.mark.parametrize("position", [-1, 5])
def test_a_position_outside_the_epoch_is_refused(position):
    with pytest.raises(ConfigError, match=f"positions {position} to {position} are outside"):
        samples_at(np.array([position]), num_samples=5, seed=0, epoch=0)


def test_ranks_take_positions_in_turn():
    expected = whole_epoch(20)[8:16]
    for rank in range(3):
        local_samples = rank_samples(1, batch=8, rank=rank, size=3, num_samples=20, seed=0, epoch=0)
        assert local_samples.samples.tolist() == expected[rank::3].tolist()


def test_samples_of_a_rank_follow_the_seed_and_the_epoch():
    local_samples = rank_samples(0, batch=20, rank=1, size=2, num_samples=20, seed=7, epoch=5)
    assert local_samples.samples.tolist() == whole_epoch(20, seed=7, epoch=5)[1::2].tolist()


def test_a_smaller_last_step_may_leave_a_rank_without_samples():
    shares = [
        rank_samples(2, batch=8, rank=r, size=4, num_samples=18, seed=0, epoch=0) for r in range(4)
    ]
    assert [s.samples.size for s in shares] == [1, 1, 0, 0]


def test_rank_samples_contain_their_epoch():
    local_samples = rank_samples(0, batch=8, rank=0, size=1, num_samples=18, seed=0, epoch=5)
    assert local_samples.epoch == 5


def test_a_step_after_the_end_of_the_epoch_is_empty():
    shares = [
        rank_samples(5, batch=8, rank=r, size=3, num_samples=18, seed=0, epoch=0) for r in range(3)
    ]
    assert sum(local_samples.samples.size for local_samples in shares) == 0


@pytest.mark.parametrize(("num_samples", "steps"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2)])
def test_steps_cover_the_epoch(num_samples, steps):
    assert steps_per_epoch(num_samples, 8) == steps


@pytest.mark.parametrize("num_samples", [4, 15, 16, 17, 18, 19, 20, 31, 33])
def test_every_rank_has_a_sample_in_every_batch(num_samples):
    ranks = [DistributedBatchSampler(num_samples, 8, rank=r, size=4) for r in range(4)]
    epochs = [list(batches) for batches in ranks]
    assert all(indices for epoch in epochs for indices in epoch)
    assert {len(epoch) for epoch in epochs} == {len(ranks[0])}


@pytest.mark.parametrize("num_samples", [4, 15, 17, 33])
def test_batches_of_all_ranks_cover_the_epoch_once(num_samples):
    seen = [
        index
        for rank in range(4)
        for indices in DistributedBatchSampler(num_samples, 8, rank=rank, size=4)
        for index in indices
    ]
    assert sorted(seen) == list(range(num_samples))


def test_a_last_batch_with_fewer_samples_than_ranks_is_merged():
    sizes = [len(b) for b in DistributedBatchSampler(19, 8, rank=0, size=4)]
    assert sizes == [2, 3]


def test_a_complete_iteration_moves_on_to_the_next_epoch():
    batches = DistributedBatchSampler(16, 4, rank=0, size=1)
    first, second = list(batches), list(batches)
    assert (batches.epoch, first == second) == (2, False)


def test_an_incomplete_iteration_stays_in_its_epoch():
    batches = DistributedBatchSampler(16, 4, rank=0, size=1)
    next(iter(batches))
    assert batches.epoch == 0


def test_set_epoch_can_repeat_an_epoch():
    batches = DistributedBatchSampler(16, 4, rank=0, size=1)
    batches.set_epoch(3)
    first = list(batches)
    batches.set_epoch(3)
    assert list(batches) == first


def test_set_epoch_during_an_iteration_has_priority():
    batches = DistributedBatchSampler(16, 4, rank=0, size=1)
    for _ in batches:
        batches.set_epoch(7)
    assert batches.epoch == 7


@pytest.mark.parametrize(("num_samples", "batch"), [(3, 8), (100, 3)])
def test_fewer_samples_than_ranks_are_refused(num_samples, batch):
    with pytest.raises(ConfigError, match="each of 4 ranks"):
        DistributedBatchSampler(num_samples, batch, rank=0, size=4)


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(ConfigError, match="rank 4 is not in a world of 4"):
        DistributedBatchSampler(100, 8, rank=4, size=4)


def test_a_plain_data_loader_accepts_the_sampler():
    import torch

    data = TensorDataset(torch.arange(10))
    loader = DataLoader(data, batch_sampler=DistributedBatchSampler(10, 4, rank=0, size=1))
    assert torch.cat([batch for (batch,) in loader]).tolist() == whole_epoch(10).tolist()
