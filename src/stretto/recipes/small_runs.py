"""Small runs: CIFAR-10 for a laptop, the demo, and the GPT that benchmarks time."""

from stretto.recipes.recipe import Recipe, Tables


def gpt_25mb(size: int) -> Tables:
    """Return the run that benchmarks time: a GPT of about 25 MB, with plain SGD.

    Each of ``size`` ranks has a batch of 4 x 64 tokens.
    """
    return {
        "model": {"kind": "gpt", "blocks": 8, "width": 256, "context": 64},
        "optim": {"kind": "sgd", "lr": 0.01, "momentum": 0.0},
        "train": {"batch": 4 * size},
    }


_HE = "He et al. 2016, arXiv:1512.03385, 4.2"


def cifar10() -> Recipe:
    """Return ResNet-18 with the small stem, for a folder of 32 x 32 images in ten classes."""
    return Recipe(
        name="cifar10",
        title="ResNet-18 on CIFAR-10",
        samples=50_000,
        tables={
            "model": {"kind": "resnet", "depth": 18, "stem": "small", "classes": 10},
            "data": {"kind": "images", "path": "cifar10", "size": 32, "augment": "pad_crop"},
            "optim": {
                "kind": "sgd",
                "lr": 0.1,
                "reference_batch": 128,
                "momentum": 0.9,
                "nesterov": True,
                "weight_decay": 5e-4,
                "warmup": "gradual",
                "warmup_epochs": 1,
                "decay": "cosine",
            },
            "train": {"batch": 128, "epochs": 30},
        },
        sources={
            "optim.lr": f"{_HE}: 0.1 at 128",
            "optim.momentum": f"{_HE}; Nesterov's form reconstructed",
            "optim.weight_decay": "reconstructed: five times that of the paper, as is usual now",
            "optim.decay": "reconstructed: a shorter run than the paper's 164 epochs",
            "optim.warmup": "Goyal et al. 2017, arXiv:1706.02677, 2.2",
            "train.batch": _HE,
            "train.epochs": "reconstructed: a shorter run than the paper's 164 epochs",
        },
    )


def demo() -> Tables:
    """Return the run of ``stretto demo``: a small CNN on generated shapes, seconds on two cores.

    The demo trains it with 1 worker and with several.
    """
    return {
        # Group norm uses statistics of a sample, so the number of workers changes no result.
        "model": {"kind": "cnn", "norm": "group"},
        "data": {"kind": "shapes", "samples": 4096},
        "optim": {"kind": "sgd", "lr": 0.05, "warmup_steps": 20, "decay": "cosine"},
        "train": {"batch": 64, "epochs": 4},
        # One thread each: results do not depend on the cores, and no threads compete for a core.
        "run": {"threads": 1},
    }
