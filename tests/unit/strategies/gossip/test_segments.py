"""Segments: every trainable parameter is in one of them, cut where the word says."""

import pytest
import torch
from torch import nn

from stretto.errors import ConfigError
from stretto.models import GPTConfig, ResNetConfig, build_model
from stretto.program.blocks import cut_segments

GPT = build_model(GPTConfig(blocks=3, width=16, heads=2, context=8, vocab=11), 0)


def names(model, how):
    return [[name for name, _ in segment] for segment in cut_segments(model, how)]


@pytest.mark.parametrize("how", ["whole", "coarse", "fine", "balanced 1", "balanced 4"])
def test_every_trainable_parameter_is_in_one_segment_in_its_order(how):
    found = [name for segment in names(GPT, how) for name in segment]
    assert found == [name for name, _ in GPT.named_parameters()]


def test_coarse_is_cut_where_the_models_own_parts_change_and_fine_where_blocks_do():
    coarse = [segment[0].partition(".")[0] for segment in names(GPT, "coarse")]
    assert coarse.count("blocks") == 1
    assert len(coarse) == len(set(coarse))
    fine = names(GPT, "fine")
    assert sum(segment[0].startswith("blocks.") for segment in fine) == 3
    assert len(fine) == len(coarse) + 2


def test_a_resnet_50_has_the_segments_of_the_paper():
    model = build_model(ResNetConfig(depth=50), 0)
    assert len(names(model, "fine")) == 1 + (3 + 4 + 6 + 3) + 1


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_balanced_segments_are_as_many_as_asked_for_and_of_about_one_size(count):
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(9)))
    sizes = [sum(p.numel() for _, p in s) for s in cut_segments(model, f"balanced {count}")]
    assert len(sizes) == count
    assert max(sizes) - min(sizes) <= 64


def test_a_parameter_that_is_larger_than_its_share_leaves_none_empty():
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(1, 1), nn.Linear(1, 1))
    assert len(cut_segments(model, "balanced 5")) == 5
    assert [len(s) for s in cut_segments(model, "balanced 3")] in ([1, 1, 3], [1, 2, 2], [1, 3, 1])


def test_what_is_of_another_type_or_frozen_is_not_in_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2))
    model[2].requires_grad_(False)
    assert names(model, "whole") == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]


@pytest.mark.parametrize("how", ["", "blocks", "balanced", "balanced 0", "balanced x"])
def test_an_unknown_cut_is_told_those_that_there_are(how):
    with pytest.raises(ConfigError, match="whole, coarse, fine, or balanced 8"):
        cut_segments(GPT, how)


def test_more_segments_than_parameters_are_told_how_many_there_can_be():
    with pytest.raises(ConfigError, match="at most balanced 2"):
        cut_segments(nn.Linear(2, 2), "balanced 3")


def test_a_parameter_of_the_model_itself_is_a_segment():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.layer = nn.Linear(2, 2)

    assert names(Scaled(), "fine") == [["scale"], ["layer.weight", "layer.bias"]]
