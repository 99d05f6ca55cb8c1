"""Settings of local updates that cannot be are refused with what could."""

import pytest
from torch import nn

from stretto.config import load
from stretto.errors import ConfigError
from stretto.program.blocks import cut_fragments
from stretto.run import RunConfig
from stretto.strategies import (
    STRATEGIES,
    DiLoCoConfig,
    LocalConfig,
    PostLocalConfig,
    check_strategy,
)

WRONG = {
    "rounds that fragments cannot share": (
        ["kind=diloco", "every=10", "fragments=4"],
        "every = 10 steps cannot be shared by fragments = 4, which take turns at equal intervals: "
        "take every = 8 or 12",
    ),
    "more fragments than steps": (
        ["kind=diloco", "every=3", "fragments=4"],
        "every = 3 steps cannot be shared by fragments = 4, which take turns at equal intervals: "
        "take every = 4",
    ),
    "a delay beyond the next fragment": (
        ["kind=diloco", "every=12", "fragments=4", "delay=3"],
        "delay = 3: a fragment is sent every 3 steps (every / fragments) and must have arrived "
        "before the next one is sent: take a delay of at most 2, or longer rounds",
    ),
    "a mix of nothing": (
        ["kind=diloco", "mix=0.0"],
        "strategy.mix = 0.0: expected a number, above 0",
    ),
    "no rounds": (["kind=local_sgd", "every=0"], "strategy.every = 0: expected a whole number, at"),
    "a momentum that never fades": (["kind=slowmo", "beta=1.0"], "strategy.beta = 1.0: expected"),
    "a wire that rounds parameters": (["kind=noloco", "wire=bf16"], 'wire = "bf16": expected'),
    "a wire there is not": (
        ["kind=local_sgd", "wire=fp8"],
        "expected own, fp32, bf16, fp16, got 'fp8'",
    ),
    "an algorithm there is not": (["kind=slowmo", "algorithm=rnig"], "no algorithm 'rnig'"),
    "fragments of a kind that has none": (["kind=slowmo", "fragments=2"], "unknown key"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_with_what_could(case):
    settings, expected = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, None, [f"strategy.{setting}" for setting in settings])
    assert expected in str(caught.value)


@pytest.mark.parametrize("word", ["local_sgd", "post_local", "slowmo", "diloco", "noloco"])
def test_every_kind_is_one_word(word):
    config = load(RunConfig, None, [f"strategy.kind={word}"]).config.strategy
    assert config == STRATEGIES[word]()
    assert isinstance(config, LocalConfig)


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def test_more_fragments_than_parameters_are_refused_before_anything_starts():
    config = DiLoCoConfig(every=14, fragments=7)
    expected = r"strategy.fragments = 7: the model has 6 trainable parameters.*take at most 6"
    with pytest.raises(ConfigError, match=expected):
        check_strategy(config, model(), ())
    check_strategy(DiLoCoConfig(every=12, fragments=6), model(), ())


def test_every_parameter_is_in_one_fragment_and_every_turn_has_one():
    for count in range(1, 7):
        cut = cut_fragments(model(), count)
        assert [fragment_turn for fragment_turn, _ in cut] == list(range(count))
        assert [name for _, named in cut for name, _ in named] == list(
            dict(model().named_parameters())
        )


def test_types_that_cannot_travel_together_share_a_turn():
    mixed = model()
    mixed[1].double()
    cut = cut_fragments(mixed, 1)
    assert [(fragment_turn, len(named)) for fragment_turn, named in cut] == [(0, 2), (0, 2), (0, 2)]


def test_turns_follow_from_the_step():
    config = DiLoCoConfig(every=6, fragments=3, delay=1)
    assert [config.fragment_turn(step) for step in range(8)] == [None, 0, None, 1, None, 2, None, 0]
    later = PostLocalConfig(every=4, from_step=2)
    assert [later.fragment_turn(step) for step in range(9)] == [
        0,
        0,
        None,
        0,
        None,
        None,
        None,
        0,
        None,
    ]
