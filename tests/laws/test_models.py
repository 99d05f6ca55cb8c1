"""Laws of every built-in model."""

import pytest
import torch

from stretto.models import (
    AlexNetConfig,
    CNNConfig,
    GPTConfig,
    ResNetConfig,
    VGGConfig,
    backbone_state,
    build_model,
    head_layer_names,
    per_sample_loss,
)

MODELS = {
    "cnn": CNNConfig(width=4),
    "cnn-batch": CNNConfig(width=4, norm="batch"),
    "cnn-group": CNNConfig(width=4, norm="group"),
    "resnet18": ResNetConfig(depth=18, width=4),
    "resnet34": ResNetConfig(depth=34, width=4),
    "resnet50": ResNetConfig(depth=50, width=4),
    "resnet18-imagenet": ResNetConfig(depth=18, width=4, stem="imagenet"),
    "resnet18-other-start": ResNetConfig(depth=18, width=4, zero_gamma=False, head_std=0.01),
    "alexnet": AlexNetConfig(size=63, width=4, hidden=32),
    "alexnet-none": AlexNetConfig(size=63, width=4, hidden=32, norm="none"),
    "vgg11": VGGConfig(depth=11, size=32, width=4, hidden=32),
    "vgg11-batch": VGGConfig(depth=11, size=32, width=4, hidden=32, norm="batch"),
    "gpt": GPTConfig(vocab=13, context=8, blocks=2, width=8, heads=2),
    "gpt-tied": GPTConfig(vocab=13, context=8, blocks=2, width=8, heads=2, tied=True),
}

every_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def batch_for(config, count):
    generator = torch.Generator().manual_seed(0)
    if isinstance(config, GPTConfig):
        tokens = torch.randint(config.vocab, (2, count, config.context), generator=generator)
        return tokens[0], tokens[1]
    side = getattr(config, "size", 32)
    images = torch.randn(count, config.channels, side, side, generator=generator)
    return images, torch.randint(config.classes, (count,), generator=generator)


def num_outputs(config):
    return config.vocab if isinstance(config, GPTConfig) else config.classes


def bits(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@every_model
def test_outputs_are_one_row_of_logits_per_target(config):
    inputs, targets = batch_for(config, 3)
    outputs = build_model(config, seed=0)(inputs)
    assert outputs.shape == (*targets.shape, num_outputs(config))


@every_model
def test_a_model_in_evaluation_mode_accepts_an_empty_batch(config):
    inputs, targets = batch_for(config, 0)
    assert build_model(config, seed=0).eval()(inputs).shape == (*targets.shape, num_outputs(config))


@every_model
def test_the_same_seed_gives_the_same_bits(config):
    assert torch.equal(bits(build_model(config, seed=3)), bits(build_model(config, seed=3)))


@every_model
def test_another_seed_gives_other_bits(config):
    assert not torch.equal(bits(build_model(config, seed=3)), bits(build_model(config, seed=4)))


@every_model
def test_weights_do_not_depend_on_earlier_random_numbers(config):
    first = bits(build_model(config, seed=3))
    torch.rand(7)
    assert torch.equal(first, bits(build_model(config, seed=3)))


@every_model
def test_building_leaves_the_global_generator_as_it_was(config):
    before = torch.get_rng_state()
    build_model(config, seed=3)
    assert torch.equal(before, torch.get_rng_state())


@every_model
def test_every_parameter_gets_a_gradient(config):
    model = build_model(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # residual blocks start at zero
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    inputs, targets = batch_for(config, 8)
    per_sample_loss(model(inputs), targets).mean().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@every_model
def test_the_head_is_the_layer_with_one_output_per_class(config):
    model = build_model(config, seed=0)
    (head,) = head_layer_names(model)
    assert model.get_submodule(head).out_features == num_outputs(config)


@every_model
def test_the_backbone_is_everything_but_the_head(config):
    model = build_model(config, seed=0)
    (head,) = head_layer_names(model)
    kept, whole = backbone_state(model), model.state_dict()
    assert whole.keys() - kept.keys() == {k for k in whole if k.startswith(f"{head}.")}
    assert all(torch.equal(value, whole[name]) for name, value in kept.items())
