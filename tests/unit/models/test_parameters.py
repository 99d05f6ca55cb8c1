"""The norms and biases of every model equal the golden file, and none of them decays."""

import json

import pytest

from stretto.optim.build import no_decay_parameter_names
from tests.golden.parameters import MODELS, PATH, build, norms_and_biases

GOLDEN = json.loads(PATH.read_text())


def test_every_model_is_in_the_golden_file():
    assert list(GOLDEN) == list(MODELS)


@pytest.mark.parametrize("label", MODELS)
def test_norms_and_biases_are_those_of_the_golden_file(label):
    assert norms_and_biases(build(label)) == GOLDEN[label]


@pytest.mark.parametrize("label", MODELS)
def test_exactly_norms_and_biases_do_not_decay(label):
    assert no_decay_parameter_names(build(label)) == {
        *GOLDEN[label]["norms"],
        *GOLDEN[label]["biases"],
    }
