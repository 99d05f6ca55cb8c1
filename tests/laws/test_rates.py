"""Learning rates: published schedules are reproduced exactly, and depend on the step only."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.optim import AdamWConfig, LARSConfig, SGDConfig, derive_lr_schedule

GOYAL = SGDConfig(
    lr=0.1,
    reference_batch=256,
    momentum=0.9,
    nesterov=True,
    weight_decay=1e-4,
    warmup_epochs=5,
    warmup_from=0.1,
    decay="step",
    decay_epochs=(30.0, 60.0, 80.0),
)
FUJITSU = LARSConfig(
    lr=13.0,
    reference_batch=86_016,
    scaling="sqrt",
    momentum=0.96,
    weight_decay=5e-5,
    trust=0.0025,
    eps=1e-9,
    ratio_decay="peak",
    warmup_epochs=36,
    warmup_from=0.0,
    decay="poly",
    decay_power=2.2,
    decay_length=52,
    decay_floor=0.0025,
)


def test_goyal_8192_is_the_published_schedule():
    epoch = 1_281_167 // 8192
    derived = derive_lr_schedule(GOYAL, batch=8192, epoch_steps=epoch, total_steps=90 * epoch)
    assert derived.lr == 3.2
    assert derived.rate_at(0) == 0.1
    for step in range(5 * epoch):
        assert derived.rate_at(step) == pytest.approx(0.1 + 3.1 * step / (5 * epoch), rel=1e-14)
    for begins, ends, rate in [(5, 30, 3.2), (30, 60, 0.32), (60, 80, 0.032), (80, 90, 0.0032)]:
        for step in (begins * epoch, ends * epoch - 1):
            assert derived.rate_at(step) == pytest.approx(rate, rel=1e-14)


def test_fujitsu_86016_is_the_published_schedule_in_every_step():
    derived = derive_lr_schedule(FUJITSU, batch=86_016, epoch_steps=15, total_steps=90 * 15)
    assert derived.lr == 13.0
    for t in range(90 * 15):
        c = t / 540 if t < 540 else (1 - 0.0025) * (1 - min(t - 540, 780) / 780) ** 2.2 + 0.0025
        assert derived.rate_at(t) == pytest.approx(13 * c, rel=1e-14)
    assert derived.rate_at(1349) == derived.rate_at(1320) == pytest.approx(0.0325, rel=1e-14)


def test_at_81920_the_square_root_rule_gives_the_rate():
    derived = derive_lr_schedule(FUJITSU, batch=81_920, epoch_steps=15, total_steps=90 * 15)
    assert derived.lr == pytest.approx(13 * math.sqrt(81_920 / 86_016), rel=1e-15)


@pytest.mark.parametrize(
    ("scaling", "batch", "lr"),
    [
        ("linear", 8192, 3.2),
        ("linear", 256, 0.1),
        ("linear", 64, 0.025),
        ("sqrt", 1024, 0.2),
        ("none", 8192, 0.1),
    ],
)
def test_the_peak_rate_scales_with_the_batch_by_the_rule(scaling, batch, lr):
    config = SGDConfig(lr=0.1, reference_batch=256, scaling=scaling)
    assert derive_lr_schedule(
        config, batch=batch, epoch_steps=9, total_steps=90
    ).lr == pytest.approx(lr)
    other = config.model_copy(update={"for_batch": batch})
    assert derive_lr_schedule(other, batch=7, epoch_steps=9, total_steps=90).lr == pytest.approx(lr)


def test_without_a_reference_batch_the_rate_is_not_scaled():
    assert (
        derive_lr_schedule(SGDConfig(lr=0.3), batch=9999, epoch_steps=9, total_steps=90).lr == 0.3
    )


@pytest.mark.parametrize("warmup_steps", [0, 1, 7, 100])
@pytest.mark.parametrize("decay", ["constant", "cosine"])
def test_plain_warm_up_and_cosine_agree_with_their_formulas(decay, warmup_steps):
    lr, total = 0.3, 60
    config = AdamWConfig(lr=lr, warmup_steps=warmup_steps, decay=decay)
    derived = derive_lr_schedule(config, batch=8, epoch_steps=10, total_steps=total)
    span = max(1, total - warmup_steps)
    for step in range(total):
        if step < warmup_steps:
            expected = lr * (step + 1) / warmup_steps
        elif decay == "constant":
            expected = lr
        else:
            expected = lr * 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / span))
        assert derived.rate_at(step) == expected


def test_a_constant_warm_up_keeps_the_unscaled_rate():
    config = SGDConfig(lr=0.1, reference_batch=256, warmup="constant", warmup_epochs=0.5)
    derived = derive_lr_schedule(config, batch=1024, epoch_steps=10, total_steps=60)
    assert [derived.rate_at(step) for step in range(7)] == [0.1] * 5 + [0.4] * 2
    lower = config.model_copy(update={"warmup_from": 0.05})
    assert derive_lr_schedule(lower, batch=1024, epoch_steps=10, total_steps=60).rate_at(4) == 0.05


def test_cosine_ends_at_its_floor_and_stays():
    config = SGDConfig(lr=2.0, decay="cosine", decay_length=3, decay_floor=0.1)
    derived = derive_lr_schedule(config, batch=1, epoch_steps=10, total_steps=60)
    assert [derived.rate_at(step) for step in (0, 15)] == pytest.approx([2.0, 1.1])
    assert [derived.rate_at(step) for step in (30, 45, 99)] == pytest.approx([0.2] * 3)


RATES = st.sampled_from(
    [
        GOYAL,
        FUJITSU,
        SGDConfig(decay="cosine", warmup_steps=20),
        SGDConfig(decay="poly", warmup_steps=20, reference_batch=100),
        SGDConfig(reference_batch=100, warmup="constant", warmup_steps=3),
        SGDConfig(reference_batch=100, warmup="none"),
    ]
)


@given(config=RATES, batch=st.integers(1, 10**6), step=st.integers(0, 10**4))
@settings(max_examples=200, deadline=None)
def test_no_rate_is_above_the_peak_or_below_zero(config, batch, step):
    derived = derive_lr_schedule(config, batch=batch, epoch_steps=50, total_steps=4500)
    assert 0 <= derived.rate_at(step) <= derived.lr * (1 + 1e-14)


@given(config=RATES, epoch_steps=st.integers(20, 500))
@settings(max_examples=50, deadline=None)
def test_the_rate_grows_through_warm_up_and_falls_after(config, epoch_steps):
    derived = derive_lr_schedule(
        config, batch=512, epoch_steps=epoch_steps, total_steps=90 * epoch_steps
    )
    rates = [derived.rate_at(step) for step in range(0, 90 * epoch_steps, 7)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert all(b <= a * (1 + 1e-14) for a, b in pairwise(rates[top:]))
