"""The runs that benchmarks time."""

from stretto.recipes.recipe import Tables


def gpt_25mb(size: int) -> Tables:
    """Return a GPT of about 25 MB, 4 x 64 tokens for each of ``size`` ranks, plain SGD."""
    return {
        "model": {"kind": "gpt", "blocks": 8, "width": 256, "context": 64},
        "optim": {"kind": "sgd", "lr": 0.01, "momentum": 0.0},
        "train": {"batch": 4 * size},
    }
