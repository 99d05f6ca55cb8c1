"""The embedded default: generated shapes and a small net, learned in seconds on two cores."""

from stretto.recipes.recipe import Tables


def demo() -> Tables:
    """Return the run that ``stretto demo`` trains, once with 1 worker and once with several."""
    return {
        # Statistics of a sample, not of a batch: any number of workers computes the same.
        "model": {"kind": "cnn", "norm": "group"},
        "data": {"kind": "shapes", "samples": 4096},
        "optim": {"kind": "sgd", "lr": 0.05, "warmup_steps": 20, "decay": "cosine"},
        "train": {"batch": 64, "epochs": 4},
        # One thread each: equal numbers, and no threads that spin for a core they do not get.
        "run": {"threads": 1},
    }
