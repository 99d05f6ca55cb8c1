"""Four profiles made from layer shapes, for planners to be compared on; no machine is measured.

    python benchmarks/profiles.py          writes benchmarks/profiles/NAME.json

Eight ranks. A layer takes two operations for each weight and place at which it is used, and twice
as many backward as forward, at one stated rate for each profile.
"""

import sys
from pathlib import Path

from stretto.plan.profile import Link, Profile, UnitCost

FOLDER = Path(__file__).parent / "profiles"
RANKS = 8
HALF_RATE, SINGLE_RATE = 500e12, 60e12
"""Operations a second that a rank does in bf16, and in 32 bits."""
VOCABULARY = 50_304
GB = 1e9


def main() -> int:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, profile in profiles().items():
        path = FOLDER / f"{name}.json"
        path.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8")
        print(f"{path.name}: {len(profile.units)} units, {profile.compute_s * 1e3:.1f} ms")
    return 0


def profiles() -> dict[str, Profile]:
    """Return the profiles by name, with the rate of the link in it."""
    return {
        "vgg16_10": Profile(units=vgg16(images=64), link=_link(10), state_bytes=4),
        "moe_60": in_half(moe(tokens=7680), 60),
        "moe_120": in_half(moe(tokens=7680), 120),
        "gpt_80": in_half(gpt(tokens=4096), 80),
    }


def in_half(units: tuple[UnitCost, ...], gb_per_s: float) -> Profile:
    """Return a profile in bf16 with Adam, which updates 32 bits and remembers two numbers."""
    link = _link(gb_per_s)
    return Profile(units=units, link=link, parameter_bytes=2, gradient_bytes=2, state_bytes=8)


def _link(gb_per_s: float) -> Link:
    return Link(ranks=RANKS, latency_s=20e-6, bytes_per_s=gb_per_s * GB)


def gpt(tokens: int, width: int = 4096, blocks: int = 24) -> tuple[UnitCost, ...]:
    """Return a GPT: attention of 4 and an MLP of 8 width^2 weights a block."""
    one = 12 * width**2
    middle = [_layer(f"block {i}", one, one, tokens, 8 * width) for i in range(blocks)]
    return _between_embedding_and_head(middle, width, tokens)


def moe(tokens: int, width: int = 2048, blocks: int = 24, experts: int = 8) -> tuple[UnitCost, ...]:
    """Return a GPT with experts in every second block, two of which each token uses."""
    dense, mlp, attention = 12 * width**2, 8 * width**2, 4 * width**2
    middle = [
        _layer(f"block {i}", attention + experts * mlp, attention + 2 * mlp, tokens, 10 * width)
        if i % 2
        else _layer(f"block {i}", dense, dense, tokens, 10 * width)
        for i in range(blocks)
    ]
    return _between_embedding_and_head(middle, width, tokens)


def _between_embedding_and_head(
    middle: list[UnitCost], width: int, tokens: int
) -> tuple[UnitCost, ...]:
    numel = VOCABULARY * width
    embedding = _layer("embedding", numel, 0, tokens, width)
    return (embedding, *middle, _layer("head", numel, numel, tokens, width))


def _layer(name: str, numel: int, used: int, tokens: int, kept: int) -> UnitCost:
    """Return a layer of which each token uses ``used`` weights, ``kept`` elements being kept."""
    forward_s = 2 * used * tokens / HALF_RATE
    return UnitCost(
        name=name,
        numel=numel,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        activation_bytes=2 * tokens * kept,
    )


def vgg16(images: int) -> tuple[UnitCost, ...]:
    """Return VGG-16 on 224 pixels: thirteen convolutions of 3 x 3, linear layers as one unit."""
    units: list[UnitCost] = []
    size, depth = 224, 3
    for stage, (count, channels) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)]):
        for index in range(count):
            weights = 9 * depth * channels
            name = f"conv {stage + 1}.{index + 1}"
            places, kept = size**2, size**2 * channels
            units.append(_seen(name, weights, channels, places, kept, images))
            depth = channels
        size //= 2
    depth *= size**2
    weights, biases = 0, 0
    for channels in [4096, 4096, 1000]:
        weights, biases, depth = weights + depth * channels, biases + channels, channels
    units.append(_seen("classifier", weights, biases, 1, biases, images))
    return tuple(units)


def _seen(name: str, weights: int, biases: int, places: int, kept: int, images: int) -> UnitCost:
    forward_s = 2 * weights * places * images / SINGLE_RATE
    return UnitCost(
        name=name,
        numel=weights + biases,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        activation_bytes=4 * kept * images,
    )


if __name__ == "__main__":
    sys.exit(main())
