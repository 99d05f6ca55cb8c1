"""A recipe's hyper-parameters as people read them: value, rule, source."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stretto.config import Loaded
from stretto.model import AlexNetConfig, ResNetConfig
from stretto.recipes.recipe import Recipe
from stretto.run import RunConfig, derived_for
from stretto.strategy import GossipConfig
from stretto.telemetry.wording import counted
from stretto.topology import grouped

_KEYS = {
    "lr": ("lr", "reference_batch", "scaling", "for_batch"),
    "warm-up": ("warmup", "warmup_steps", "warmup_epochs", "warmup_from"),
    "decay": ("decay", "decay_epochs", "decay_factor", "decay_power", "decay_length"),
    "floor": ("decay", "decay_floor"),
    "weight decay": ("weight_decay", "decay_all"),
    "momentum": ("momentum", "nesterov", "order", "momentum_correction"),
    "betas": ("beta1", "beta2", "eps"),
    "ratio": (
        *("trust", "eps", "ratio_decay", "norm_limit"),
        *("norm_group", "norm_group_from_epoch"),
    ),
    "length": (),
}
"""Of ``[optim]``, what each derived line follows from; its source is kept under the first. How a
run is cut off follows from everything, and is nobody's choice."""


@dataclass(frozen=True, slots=True)
class Told:
    """One line: what, its value, the rule that gave it, and who says so."""

    name: str
    value: str
    rule: str
    source: str


class _Line(NamedTuple):
    """A line before anybody is asked for its source."""

    keys: tuple[str, ...]
    """The settings it follows from."""
    name: str
    value: str
    rule: str


def tell(recipe: Recipe, loaded: Loaded[RunConfig], num_samples: int, workers: int) -> list[Told]:
    """Return every hyper-parameter of ``loaded``, a run laid over ``recipe``."""
    derived = derived_for(loaded.config, num_samples)
    lines = _size(loaded.config, derived.epoch_steps, num_samples, workers)
    for line in derived.lines():
        keys = tuple(f"optim.{key}" for key in _KEYS[line.name])
        lines.append(_Line(keys, line.name, line.value, line.rule))
    lines += _rest(loaded.config) + _strategy(loaded.config)
    return [
        Told(line.name, line.value, line.rule, _source(recipe, loaded, line.keys)) for line in lines
    ]


def refused(config: RunConfig, workers: int) -> str | None:
    """Return why so many workers cannot train ``config``, in words; None where they can.

    As many groups as there are hosts are counted only where there are hosts.
    """
    strategy = config.strategy
    if not isinstance(strategy, GossipConfig) or not isinstance(strategy.groups, int):
        return None
    reason = grouped(strategy.who(), strategy.groups).refuses(workers)
    return f"strategy.groups = {strategy.groups}: {reason}" if reason else None


def _size(config: RunConfig, epoch_steps: int, num_samples: int, workers: int) -> list[_Line]:
    train = config.train
    share = -(-train.batch // workers)
    pieces = train.pieces(workers)
    at_once = -(-share // pieces)
    cut = f"{pieces} micro-batches of {at_once}" if pieces > 1 else "at once"
    shared = f"{counted(workers, 'worker')}, {share} each, {cut}"
    length = "epochs" if train.steps is None else "steps"
    lasts = train.epochs if train.steps is None else train.steps
    epoch = f"an epoch has {train.epoch_samples or num_samples} samples, {epoch_steps} steps"
    return [
        _Line(("train.batch",), "batch", f"{train.batch}", shared),
        _Line(("train.epochs", "train.epoch_samples", "train.steps"), length, f"{lasts}", epoch),
        _Line(
            ("train.micro_batch",),
            "batch norm",
            f"over {at_once}",
            "samples of one worker at a time",
        ),
    ]


def _rest(config: RunConfig) -> list[_Line]:
    """Return what is set as it is: nothing of it follows the batch."""
    train, model, data = config.train, config.model, config.data
    smoothing, precision = f"{train.label_smoothing:g}", train.precision
    rest = [
        _Line(("train.label_smoothing",), "label smoothing", smoothing, "on all classes"),
        _Line(("train.precision",), "precision", precision, "weights and updates in fp32"),
    ]
    if train.clip_norm is not None:
        most, of = (
            f"{train.clip_norm:g}",
            "the most that a gradient's norm may be, all layers together",
        )
        rest.append(_Line(("train.clip_norm",), "clipping", most, of))
    if isinstance(model, ResNetConfig):
        first = "0" if model.zero_gamma else "1"
        rest.append(_Line(("model.zero_gamma",), "last gamma", first, "of each block, at first"))
        if model.start == "uniform":
            drawn = "convolutions and the last layer, by the channels they are fed by"
            rest.append(_Line(("model.start",), "first weights", model.start, drawn))
    if isinstance(model, AlexNetConfig):
        norm = "a batch norm after the last pooling"
        rest.append(_Line(("model.norm",), "norm", model.norm, norm))
    if data.kind == "images" and data.augment == "area_crop":
        area = f"{data.area[0]:g} to {data.area[1]:g}"
        aspect = f"of the area, aspect {data.aspect[0]:.4g} to {data.aspect[1]:.4g}"
        rest.append(_Line(("data.area", "data.aspect"), "crops", area, aspect))
        if data.plain_from_epoch is not None:
            late = f"at the centre, from epoch {data.plain_from_epoch} on"
            keys = ("data.plain_from_epoch",)
            rest.append(_Line(keys, "late crops", "the largest square", late))
    return rest


def _strategy(config: RunConfig) -> list[_Line]:
    """Return how ranks stay together, where they have models of their own."""
    strategy = config.strategy
    if not isinstance(strategy, GossipConfig):
        return []
    lines = [
        _Line(("strategy.kind",), "strategy", strategy.kind, f"{strategy.mix} meet those of peers"),
        _Line(("strategy.topology",), "peers", strategy.topology, "who meets whom in a round"),
        _Line(("strategy.segments",), "segments", strategy.segments, "what meets peers of its own"),
    ]
    if strategy.groups is not None:
        each = "ranks in a row, which have one model; groups are each other's peers"
        lines.append(_Line(("strategy.groups",), "groups", f"{strategy.groups}", each))
    return lines


def _source(recipe: Recipe, loaded: Loaded[RunConfig], keys: Sequence[str]) -> str:
    """Return who says so; what somebody has set over the recipe is no longer the source's."""
    if not keys:
        return ""
    changed = {key: how for key in keys if (how := _changed(recipe, loaded, key))}
    if keys[0] in changed:
        return changed[keys[0]]
    source, optim = recipe.sources.get(keys[0], ""), loaded.config.optim
    batch = optim.for_batch or loaded.config.train.batch
    if keys[0] == "optim.lr" and optim.reference_batch not in (None, batch):
        rule = "" if "optim.scaling" in changed else recipe.sources.get("optim.scaling", "")
        source = "; ".join(filter(None, [f"derived from {source}", rule]))
    else:
        told = (recipe.sources.get(key, "") for key in keys[1:] if key != "optim.scaling")
        source = "; ".join(dict.fromkeys(filter(None, [source, *told])))
    mine = [f"{key.rpartition('.')[2]} {how}" for key, how in changed.items()]
    return "; ".join(filter(None, [source, *mine]))


def _changed(recipe: Recipe, loaded: Loaded[RunConfig], key: str) -> str:
    """Return how ``key`` is no longer the recipe's: set by whom, or taken back; empty where it is.

    Another kind of a table takes back all that the recipe said for its own.
    """
    origin = loaded.origin.get(key, "default")
    if origin == "recipe":
        return ""
    if origin == "default":
        table, _, name = key.partition(".")
        was_set = key in loaded.origin and name in recipe.tables.get(table, {})
        return "taken back to its default" if was_set else ""
    return f"set by {'an override' if origin == 'override' else origin}"
