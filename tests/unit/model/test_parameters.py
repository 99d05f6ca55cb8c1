"""Norms and biases of every model: those of the golden file, and those that are not decayed."""

import json

import pytest

from stretto.optim.groups import undecayed
from tests.golden.parameters import MODELS, PATH, build, norms_and_biases

GOLDEN = json.loads(PATH.read_text())


def test_every_model_is_in_the_golden_file():
    assert list(GOLDEN) == list(MODELS)


@pytest.mark.parametrize("label", MODELS)
def test_norms_and_biases_are_those_of_the_golden_file(label):
    assert norms_and_biases(build(label)) == GOLDEN[label]


@pytest.mark.parametrize("label", MODELS)
def test_what_is_not_decayed_is_exactly_norms_and_biases(label):
    assert undecayed(build(label)) == {*GOLDEN[label]["norms"], *GOLDEN[label]["biases"]}
