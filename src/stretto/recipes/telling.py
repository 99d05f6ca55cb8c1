"""A recipe's hyper-parameters as people read them: value, rule, source."""

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.config import Loaded
from stretto.data.order import steps_per_epoch
from stretto.model import AlexNetConfig, ResNetConfig
from stretto.recipes.recipe import Recipe
from stretto.run import RunConfig, derived_for

_KEYS = {
    "lr": ("lr", "reference_batch", "scaling", "for_batch"),
    "warm-up": ("warmup", "warmup_steps", "warmup_epochs", "warmup_from"),
    "decay": ("decay", "decay_epochs", "decay_factor", "decay_power", "decay_length"),
    "floor": ("decay", "decay_floor"),
    "weight decay": ("weight_decay", "decay_all"),
    "momentum": ("momentum", "nesterov", "order", "momentum_correction"),
    "betas": ("beta1", "beta2", "eps"),
    "ratio": ("trust", "eps", "ratio_decay", "norm_limit"),
}
"""Of ``[optim]``, what each derived line follows from; its source is kept under the first."""


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
        (" ".join(f"optim.{key}" for key in _KEYS[line.name]), line.name, line.value, line.rule)
        for line in derived_for(config, num_samples).lines()
    ]
    lines += _rest(config)
    return [
        Told(name, value, rule, _source(recipe, loaded, keys.split()))
        for keys, name, value, rule in lines
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
        (
            "train.epochs train.epoch_samples train.steps",
            "epochs" if train.steps is None else "steps",
            f"{train.epochs if train.steps is None else train.steps}",
            f"an epoch has {num_samples} samples, {steps} steps",
        ),
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
    if isinstance(model, AlexNetConfig):
        rest.append(("model.norm", "norm", model.norm, "a batch norm after the last pooling"))
    if data.kind == "images" and data.augment == "area_crop":
        area = f"{data.area[0]:g} to {data.area[1]:g}"
        aspect = f"of the area, aspect {data.aspect[0]:.4g} to {data.aspect[1]:.4g}"
        rest.append(("data.area data.aspect", "crops", area, aspect))
        if data.plain_from_epoch is not None:
            told = ("the largest square", f"at the centre, from epoch {data.plain_from_epoch} on")
            rest.append(("data.plain_from_epoch", "late crops", *told))
    return rest


def _source(recipe: Recipe, loaded: Loaded[RunConfig], keys: Sequence[str]) -> str:
    """Return who says so; what somebody has set over the recipe is no longer the source's."""
    set_by = {key: by for key in keys if (by := _set_by(loaded, key))}
    if keys[0] in set_by:
        return f"set by {set_by[keys[0]]}"
    source, optim = recipe.sources.get(keys[0], ""), loaded.config.optim
    batch = optim.for_batch or loaded.config.train.batch
    if keys[0] == "optim.lr" and optim.reference_batch not in (None, batch):
        rule = "" if "optim.scaling" in set_by else recipe.sources.get("optim.scaling", "")
        source = "; ".join(filter(None, [f"derived from {source}", rule]))
    else:
        told = (recipe.sources.get(key, "") for key in keys[1:] if key != "optim.scaling")
        source = "; ".join(dict.fromkeys(filter(None, [source, *told])))
    mine = [f"{key.rpartition('.')[2]} set by {by}" for key, by in set_by.items()]
    return "; ".join(filter(None, [source, *mine]))


def _set_by(loaded: Loaded[RunConfig], key: str) -> str:
    """Return which file or override has set ``key`` over the recipe; empty where none has."""
    origin = loaded.origin.get(key, "default")
    return {"recipe": "", "default": "", "override": "an override"}.get(origin, origin)
