"""Make four profiles from layer shapes, without measuring, to compare planners on.

    python benchmarks/profiles.py          writes benchmarks/profiles/NAME.json

Each has eight ranks. A layer takes two operations for each weight and each position (a token or a
pixel) that uses it, and twice as many in the backward pass. Each profile assumes one rate of
operations.
"""

import sys
from pathlib import Path

from stretto.planner.profile import Link, Profile, UnitCost

FOLDER = Path(__file__).parent / "profiles"
RANKS = 8
HALF_RATE, SINGLE_RATE = 500e12, 60e12
"""Operations per second of a rank, in bf16 and in fp32."""
VOCABULARY = 50_304
GB = 1e9


def main() -> int:
    """Write all profiles as JSON files."""
    FOLDER.mkdir(exist_ok=True)
    for name, profile in profiles().items():
        path = FOLDER / f"{name}.json"
        path.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8")
        print(f"{path.name}: {len(profile.units)} units, {profile.compute_s * 1e3:.1f} ms")
    return 0


def profiles() -> dict[str, Profile]:
    """Return the profiles by name; the number in a name is the rate of the link, in GB/s."""
    return {
        "vgg16_10": Profile(units=vgg16(images=64), link=_link(10), state_bytes=4),
        "moe_60": in_bf16(moe(tokens=7680), 60),
        "moe_120": in_bf16(moe(tokens=7680), 120),
        "gpt_80": in_bf16(gpt(tokens=4096), 80),
    }


def in_bf16(units: tuple[UnitCost, ...], gb_per_s: float) -> Profile:
    """Return a profile in bf16 with Adam, whose state has two fp32 values per parameter."""
    link = _link(gb_per_s)
    return Profile(units=units, link=link, parameter_bytes=2, gradient_bytes=2, state_bytes=8)


def _link(gb_per_s: float) -> Link:
    return Link(ranks=RANKS, latency_s=20e-6, bytes_per_s=gb_per_s * GB)


def gpt(tokens: int, width: int = 4096, blocks: int = 24) -> tuple[UnitCost, ...]:
    """Return a GPT; a block has 4 width^2 weights in its attention and 8 width^2 in its MLP."""
    one = 12 * width**2
    middle = [_layer(f"block {i}", one, one, tokens, 8 * width) for i in range(blocks)]
    return _between_embedding_and_head(middle, width, tokens)


def moe(tokens: int, width: int = 2048, blocks: int = 24, experts: int = 8) -> tuple[UnitCost, ...]:
    """Return a mixture-of-experts GPT: every second block has experts, and a token uses two."""
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


def _layer(name: str, numel: int, used: int, tokens: int, activations: int) -> UnitCost:
    """Return a layer of which a token uses ``used`` weights and keeps ``activations`` elements."""
    forward_s = 2 * used * tokens / HALF_RATE
    return UnitCost(
        name=name,
        numel=numel,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        activation_bytes=2 * tokens * activations,
    )


def vgg16(images: int) -> tuple[UnitCost, ...]:
    """Return VGG-16 at 224 x 224 pixels: 13 convolutions of 3 x 3, and all linears as one unit."""
    units: list[UnitCost] = []
    size, in_channels = 224, 3
    for stage, (count, out_channels) in enumerate(
        [(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)]
    ):
        for index in range(count):
            weights = 9 * in_channels * out_channels
            name = f"conv {stage + 1}.{index + 1}"
            pixels, activations = size**2, size**2 * out_channels
            units.append(_vgg_unit(name, weights, out_channels, pixels, activations, images))
            in_channels = out_channels
        size //= 2
    in_features = in_channels * size**2
    weights, biases = 0, 0
    for out_features in [4096, 4096, 1000]:
        weights, biases = weights + in_features * out_features, biases + out_features
        in_features = out_features
    units.append(_vgg_unit("classifier", weights, biases, 1, biases, images))
    return tuple(units)


def _vgg_unit(
    name: str, weights: int, biases: int, positions: int, activations: int, images: int
) -> UnitCost:
    """Return a unit whose weights are used at ``positions`` of each image."""
    forward_s = 2 * weights * positions * images / SINGLE_RATE
    return UnitCost(
        name=name,
        numel=weights + biases,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        activation_bytes=4 * activations * images,
    )


if __name__ == "__main__":
    sys.exit(main())
