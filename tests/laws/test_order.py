"""Each sample is read exactly once an epoch, for any world size and when the size changes."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data.order import rank_samples, steps_per_epoch

sizes = st.integers(1, 8)
data = st.fixed_dictionaries(
    {
        "num_samples": st.integers(0, 120),
        "batch": st.integers(1, 40),
        "seed": st.integers(-(2**63), 2**64),
        "epoch": st.integers(0, 10**6),
    }
)


def samples_of_step(step, size, data):
    return [rank_samples(step, rank=rank, size=size, **data) for rank in range(size)]


@settings(deadline=None)
@given(size_at=st.lists(sizes, min_size=1, max_size=6), data=data)
def test_each_sample_is_read_once_an_epoch_while_the_world_size_changes(size_at, data):
    seen = Counter()
    for step in range(steps_per_epoch(data["num_samples"], data["batch"])):
        for local_samples in samples_of_step(step, size_at[step % len(size_at)], data):
            seen.update(local_samples.samples.tolist())
    assert seen == Counter(range(data["num_samples"]))


@settings(deadline=None)
@given(size=sizes, step=st.integers(0, 20), data=data)
def test_a_step_holds_the_same_samples_at_every_world_size(size, step, data):
    (one_rank,) = samples_of_step(step, 1, data)
    all_ranks = [
        i
        for local_samples in samples_of_step(step, size, data)
        for i in local_samples.samples.tolist()
    ]
    assert sorted(all_ranks) == sorted(one_rank.samples.tolist())


@settings(deadline=None)
@given(size=sizes, step=st.integers(0, 20), data=data)
def test_the_samples_of_a_step_add_up_to_the_batch_or_the_rest_of_the_epoch(size, step, data):
    left = max(data["num_samples"] - step * data["batch"], 0)
    counts = [local_samples.samples.size for local_samples in samples_of_step(step, size, data)]
    assert sum(counts) == min(data["batch"], left)


@settings(deadline=None)
@given(size=sizes, step=st.integers(0, 20), data=data)
def test_ranks_differ_by_at_most_one_sample(size, step, data):
    counts = [local_samples.samples.size for local_samples in samples_of_step(step, size, data)]
    assert max(counts) - min(counts) <= 1
