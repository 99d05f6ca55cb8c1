"""The runs that benchmarks time."""


def gpt_25mb(size: int) -> tuple[str, ...]:
    """Return the settings of a GPT of about 25 MB, 4 x 64 tokens a rank, plain SGD."""
    return (
        "model.kind=gpt",
        "model.blocks=8",
        "model.width=256",
        "model.context=64",
        f"train.batch={4 * size}",
        "optim.kind=sgd",
        "optim.lr=0.01",
        "optim.momentum=0.0",
    )
