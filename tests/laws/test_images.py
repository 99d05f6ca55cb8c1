"""Every good image exactly once an epoch and every bad one named, whatever the world is."""

from collections import Counter
from contextlib import ExitStack, closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.data import Images, ImagesConfig, step_share, steps_per_epoch
from tests.imagenet import write_imagenet
from tests.unit.data.images.pictures import CORRUPT, PLAIN, alone, fill, jpeg, numbers

pytestmark = pytest.mark.multi
NUM_SAMPLES = 170
BAD = {3 * i + 1: kind for i, kind in enumerate(list(CORRUPT) * 10)}
"""Fifty of the samples, ten of each kind."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Four ranks that have opened one folder; the smaller worlds use the first of them."""
    files = {
        f"train/{'ab'[2 * i // NUM_SAMPLES]}/{i:03}.jpg": CORRUPT[BAD[i]] if i in BAD else jpeg(i)
        for i in range(NUM_SAMPLES)
    }
    folder = fill(tmp_path_factory.mktemp("images"), files | {"test/a/0.jpg": jpeg()})
    (folder / "test" / "b").mkdir()
    config = ImagesConfig(path=str(folder), size=16, augment="none", decoders=1, **PLAIN)
    with ExitStack() as stack:
        sources = [stack.enter_context(closing(Images(config, train=True))) for _ in range(4)]
        for source in sources:
            source.start(alone("law"))
        yield sources


def one_epoch(sources, *, batch, seed, epoch):
    """Return the numbers seen and the samples skipped, over all ranks and steps."""
    seen, skipped = Counter(), Counter()
    for step in range(steps_per_epoch(NUM_SAMPLES, batch)):
        for rank, source in enumerate(sources):
            share = step_share(
                step,
                batch=batch,
                rank=rank,
                size=len(sources),
                num_samples=NUM_SAMPLES,
                seed=seed,
                epoch=epoch,
            )
            inputs, targets = source.batch(share.samples, share.epoch)
            account = source.take_account()
            assert len(inputs) == len(targets) == len(share.samples) - len(account.skipped)
            seen.update(numbers(inputs))
            skipped.update(account.skipped)
    return seen, skipped


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    size=st.integers(1, 4),
    batch=st.integers(3, 64),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 100),
)
def test_every_good_image_comes_once_an_epoch_and_every_bad_one_is_named(
    ranks, size, batch, seed, epoch
):
    seen, skipped = one_epoch(ranks[:size], batch=batch, seed=seed, epoch=epoch)
    assert seen == Counter(i for i in range(NUM_SAMPLES) if i not in BAD)
    named = Counter(int(bad.sample[-7:-4]) for bad in skipped.elements())
    assert named == Counter(list(BAD))


def test_fifty_corrupt_files_are_listed_with_the_reason_of_each(ranks):
    _, skipped = one_epoch(ranks[:2], batch=20, seed=0, epoch=0)
    expected = {"text": "not an image", "empty": "empty file", "huge": "60000 x 60000"}
    assert len(skipped) == 50
    for bad in skipped:
        kind = BAD[int(bad.sample[-7:-4])]
        assert expected.get(kind, "") in bad.reason
        assert len(bad.reason.splitlines()) == 1


def test_the_order_of_asking_does_not_change_a_sample(ranks):
    order = np.random.default_rng(0).permutation(NUM_SAMPLES)
    straight = ranks[0].batch(np.arange(NUM_SAMPLES), 5)[0]
    shuffled = ranks[1].batch(order, 5)[0]
    good = [i for i in order if i not in BAD]
    assert (shuffled == straight[np.searchsorted(sorted(good), good)]).all()


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Four ranks that take area crops of one folder in the shape of ImageNet."""
    folder = write_imagenet(tmp_path_factory.mktemp("imagenet"), classes=20, per_class=2, val=5)
    config = ImagesConfig(path=str(folder), size=24, augment="area_crop", decoders=1)
    with ExitStack() as stack:
        sources = [stack.enter_context(closing(Images(config, train=True))) for _ in range(4)]
        for source in sources:
            source.start(alone("photographs"))
        yield sources


@settings(max_examples=12, deadline=None)
@given(size=st.integers(1, 4), batch=st.integers(3, 40), epoch=st.integers(0, 2))
def test_an_area_crop_is_the_same_on_any_rank_in_any_batch(photographs, size, batch, epoch):
    num_samples = photographs[0].num_samples
    straight, labels = photographs[3].batch(np.arange(num_samples), epoch)
    for step in range(steps_per_epoch(num_samples, batch)):
        for rank, source in enumerate(photographs[:size]):
            place = {"batch": batch, "rank": rank, "size": size, "num_samples": num_samples}
            share = step_share(step, **place, seed=1, epoch=epoch)
            inputs, targets = source.batch(share.samples, share.epoch)
            assert (inputs == straight[share.samples]).all()
            assert (targets == labels[share.samples]).all()


def test_another_epoch_shows_every_photograph_otherwise(photographs):
    first, second = (photographs[0].batch(np.arange(40), epoch)[0] for epoch in (0, 1))
    assert (first != second).flatten(1).any(1).all()
