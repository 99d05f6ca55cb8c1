"""A recipe's hyper-parameters as people read them: value, rule, source."""

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.config import Loaded
from stretto.data.order import steps_per_epoch
from stretto.model import ResNetConfig
from stretto.recipes.recipe import Recipe
from stretto.run import RunConfig, derived_for

_KEYS = {
    "lr": "optim.lr",
    "warm-up": "optim.warmup",
    "decay": "optim.decay",
    "floor": "optim.decay",
    "weight decay": "optim.weight_decay",
    "momentum": "optim.momentum",
    "betas": "optim.beta1",
    "ratio": "optim.trust",
}
"""The setting that stands for each derived line, under which its source is kept."""


@dataclass(frozen=True, slots=True)
class Told:
    """One line: what, its value, the rule that gave it, and who says so."""

    name: str
    value: str
    rule: str
    source: str


def tell(recipe: Recipe, loaded: Loaded[RunConfig], num_samples: int, workers: int) -> list[Told]:
    """Return every hyper-parameter of ``loaded``, a run laid over ``recipe``."""
    config = loaded.config
    lines = [*_size(config, num_samples, workers)]
    lines += [
        (_KEYS[line.name], line.name, line.value, line.rule)
        for line in derived_for(config, num_samples).lines()
    ]
    lines += _rest(config)
    return [
        Told(name, value, rule, _source(recipe, loaded, key)) for key, name, value, rule in lines
    ]


def _size(config: RunConfig, num_samples: int, workers: int) -> Sequence[tuple[str, str, str, str]]:
    train = config.train
    share = -(-train.batch // workers)
    steps = steps_per_epoch(num_samples, train.batch)
    pieces = train.pieces(share)
    at_once = -(-share // pieces)
    cut = f"{pieces} micro-batches of {at_once}" if pieces > 1 else "at once"
    told = f"{workers} workers, {share} each, {cut}"
    return (
        ("train.batch", "batch", f"{train.batch}", told),
        ("train.epochs", "epochs", f"{train.epochs}", f"of {num_samples} samples, {steps} steps"),
        (
            "train.micro_batch",
            "batch norm",
            f"over {at_once}",
            "samples of one worker at a time",
        ),
    )


def _rest(config: RunConfig) -> list[tuple[str, str, str, str]]:
    """Return what is set as it is: nothing of it follows the batch."""
    train, model, data = config.train, config.model, config.data
    rest = [
        (
            "train.label_smoothing",
            "label smoothing",
            f"{train.label_smoothing:g}",
            "on all classes",
        ),
        ("train.precision", "precision", train.precision, "weights and updates in fp32"),
    ]
    if isinstance(model, ResNetConfig):
        first = "0" if model.zero_gamma else "1"
        rest.append(("model.zero_gamma", "last gamma", first, "of each block, at first"))
    if data.kind == "images" and data.augment == "area_crop":
        area = f"{data.area[0]:g} to {data.area[1]:g}"
        aspect = f"of the area, aspect {data.aspect[0]:.4g} to {data.aspect[1]:.4g}"
        rest.append(("data.area", "crops", area, aspect))
        if data.plain_from_epoch is not None:
            told = ("whole images", f"from epoch {data.plain_from_epoch} on")
            rest.append(("data.plain_from_epoch", "late crops", *told))
    return rest


def _source(recipe: Recipe, loaded: Loaded[RunConfig], key: str) -> str:
    """Return who says so; what somebody has set over the recipe is no longer the source's."""
    set_by = loaded.origin.get(key, "default")
    if set_by not in ("recipe", "default"):
        return f"set by {'an override' if set_by == 'override' else set_by}"
    source, optim = recipe.sources.get(key, ""), loaded.config.optim
    batch = optim.for_batch or loaded.config.train.batch
    if key == "optim.lr" and optim.reference_batch not in (None, batch):
        rule = recipe.sources.get("optim.scaling")
        return f"derived from {source}{f'; {rule}' if rule else ''}"
    return source
