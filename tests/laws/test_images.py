"""At any world size every good image is read once an epoch and every bad one is reported."""

from collections import Counter
from contextlib import ExitStack, closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.data import ImageFolder, ImagesConfig, rank_samples, steps_per_epoch
from tests.imagenet import write_imagenet
from tests.unit.data.images.pictures import CORRUPT, PLAIN, fill, jpeg, numbers, single_rank

pytestmark = pytest.mark.multi
NUM_SAMPLES = 170
BAD = {3 * i + 1: kind for i, kind in enumerate(list(CORRUPT) * 10)}
"""Fifty of the samples, ten of each kind of damage."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Four ranks that have opened one folder; smaller worlds use the first of them."""
    files = {
        f"train/{'ab'[2 * i // NUM_SAMPLES]}/{i:03}.jpg": CORRUPT[BAD[i]] if i in BAD else jpeg(i)
        for i in range(NUM_SAMPLES)
    }
    folder = fill(tmp_path_factory.mktemp("images"), files | {"test/a/0.jpg": jpeg()})
    (folder / "test" / "b").mkdir()
    config = ImagesConfig(path=str(folder), size=16, augment="none", decoders=1, **PLAIN)
    with ExitStack() as stack:
        sources = [stack.enter_context(closing(ImageFolder(config, train=True))) for _ in range(4)]
        for source in sources:
            source.start(single_rank("law"))
        yield sources


def one_epoch(sources, *, batch, seed, epoch):
    """Return the image numbers seen and the samples skipped, over all ranks and steps."""
    seen, skipped = Counter(), Counter()
    for step in range(steps_per_epoch(NUM_SAMPLES, batch)):
        for rank, source in enumerate(sources):
            local_samples = rank_samples(
                step,
                batch=batch,
                rank=rank,
                size=len(sources),
                num_samples=NUM_SAMPLES,
                seed=seed,
                epoch=epoch,
            )
            inputs, targets = source.batch(local_samples.samples, local_samples.epoch)
            statistics = source.take_statistics()
            assert (
                len(inputs) == len(targets) == len(local_samples.samples) - len(statistics.skipped)
            )
            seen.update(numbers(inputs))
            skipped.update(statistics.skipped)
    return seen, skipped


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    size=st.integers(1, 4),
    batch=st.integers(3, 64),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 100),
)
def test_every_good_image_is_read_once_an_epoch_and_every_bad_one_is_reported(
    ranks, size, batch, seed, epoch
):
    seen, skipped = one_epoch(ranks[:size], batch=batch, seed=seed, epoch=epoch)
    assert seen == Counter(i for i in range(NUM_SAMPLES) if i not in BAD)
    named = Counter(int(bad.sample[-7:-4]) for bad in skipped.elements())
    assert named == Counter(list(BAD))


def test_fifty_corrupt_files_are_listed_with_their_reasons(ranks):
    _, skipped = one_epoch(ranks[:2], batch=20, seed=0, epoch=0)
    expected = {"text": "not an image", "empty": "empty file", "huge": "60000 x 60000"}
    assert len(skipped) == 50
    for bad in skipped:
        kind = BAD[int(bad.sample[-7:-4])]
        assert expected.get(kind, "") in bad.reason
        assert len(bad.reason.splitlines()) == 1


def test_a_sample_does_not_depend_on_the_order_of_requests(ranks):
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
        sources = [stack.enter_context(closing(ImageFolder(config, train=True))) for _ in range(4)]
        for source in sources:
            source.start(single_rank("photographs"))
        yield sources


@settings(max_examples=12, deadline=None)
@given(size=st.integers(1, 4), batch=st.integers(3, 40), epoch=st.integers(0, 2))
def test_an_area_crop_is_the_same_on_any_rank_in_any_batch(photographs, size, batch, epoch):
    num_samples = photographs[0].num_samples
    straight, labels = photographs[3].batch(np.arange(num_samples), epoch)
    for step in range(steps_per_epoch(num_samples, batch)):
        for rank, source in enumerate(photographs[:size]):
            layout = {"batch": batch, "rank": rank, "size": size, "num_samples": num_samples}
            local_samples = rank_samples(step, **layout, seed=1, epoch=epoch)
            inputs, targets = source.batch(local_samples.samples, local_samples.epoch)
            assert (inputs == straight[local_samples.samples]).all()
            assert (targets == labels[local_samples.samples]).all()


def test_another_epoch_crops_every_photograph_differently(photographs):
    first, second = (photographs[0].batch(np.arange(40), epoch)[0] for epoch in (0, 1))
    assert (first != second).flatten(1).any(1).all()
