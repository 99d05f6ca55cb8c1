import pytest
import torch
from pydantic import ValidationError

from stretto.errors import ConfigError
from stretto.models import GPTConfig, build_model

SMALL = {"vocab": 11, "context": 8, "blocks": 2, "width": 12, "heads": 3}


def test_eight_blocks_of_width_256_are_about_25_megabytes():
    model = build_model(GPTConfig(blocks=8, width=256, vocab=256, context=64), seed=0)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert 24e6 < num_bytes < 27e6


def test_a_logit_does_not_depend_on_later_tokens():
    model = build_model(GPTConfig(**SMALL), seed=0)
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 10
    same = torch.isclose(model(tokens), model(changed), atol=1e-7).all(dim=-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


def test_positions_matter():
    model = build_model(GPTConfig(**SMALL), seed=0)
    logits = model(torch.zeros(1, 8, dtype=torch.int64))
    assert not torch.allclose(logits[0, 0], logits[0, 7])


def test_a_shorter_sample_will_do():
    assert build_model(GPTConfig(**SMALL), seed=0)(torch.zeros(2, 3).long()).shape == (2, 3, 11)


def test_a_longer_sample_is_refused_with_both_lengths():
    model = build_model(GPTConfig(**SMALL), seed=0)
    with pytest.raises(ConfigError, match=r"9 tokens, model\.context is 8"):
        model(torch.zeros(1, 9, dtype=torch.int64))


def test_tied_weights_are_one_parameter():
    tied = build_model(GPTConfig(**SMALL, tied=True), seed=0)
    untied = build_model(GPTConfig(**SMALL), seed=0)
    assert tied.head.weight is tied.tokens.weight
    assert len(list(untied.parameters())) - len(list(tied.parameters())) == 1


def test_linear_layers_have_no_bias():
    model = build_model(GPTConfig(**SMALL), seed=0)
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert all(linear.bias is None for linear in linears)


def test_backward_finishes_gradients_in_reverse_order_of_registration():
    model = build_model(GPTConfig(**SMALL), seed=0)
    finished = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: finished.append(name))
    model(torch.zeros(1, 8, dtype=torch.int64)).square().sum().backward()
    assert _module_order(finished) == _module_order(reversed([n for n, _ in _named(model)]))


def test_dropout_acts_in_training_only():
    model = build_model(GPTConfig(**SMALL, dropout=0.5), seed=0)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_heads_that_cannot_share_the_width_are_refused():
    with pytest.raises(ValidationError, match="multiple of heads"):
        GPTConfig(width=10, heads=3)


def _named(model):
    return list(model.named_parameters())


def _module_order(names):
    """Return the modules in order; the order of the parameters of one module does not matter."""
    modules = [name.rpartition(".")[0] for name in names]
    # Both embeddings receive their gradients from one sum.
    joined = ["embedding" if m in ("tokens", "positions") else m for m in modules]
    return list(dict.fromkeys(joined))
