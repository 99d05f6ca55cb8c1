"""The type of a recipe, and its derived hyper-parameters as lines to print.

The recipes themselves are in `stretto.recipes.imagenet` and `stretto.recipes.small_runs`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stretto.config import LoadedConfig
from stretto.models import AlexNetConfig, ResNetConfig
from stretto.run import RunConfig, derive_rates
from stretto.strategies import GossipConfig
from stretto.telemetry.event_text import count_text
from stretto.topology import grouped

Tables = Mapping[str, Mapping[str, object]]
"""Table name -> key -> value. `stretto.config.load` merges defaults, these, and the run file."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A complete run. The settings that affect the result name their sources."""

    name: str
    title: str
    tables: Tables
    sources: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> publication; "reconstructed" with the reason where nothing is published."""
    samples: int = 0
    """Number of training samples of the data that it is made for."""
    based_on: str = ""
    """Name of the recipe it is derived from."""


def derive_recipe(
    base: Recipe, name: str, title: str, tables: Tables, sources: Mapping[str, str]
) -> Recipe:
    """Return ``base`` with the settings of ``tables``; inherited settings keep their sources.

    A table whose ``kind`` changes inherits nothing.
    """
    joined = {key: dict(table) for key, table in base.tables.items()}
    kept = dict(base.sources)
    for key, table in tables.items():
        before = joined.get(key, {})
        if table.get("kind", before.get("kind")) != before.get("kind"):
            before = {}
            kept = {path: source for path, source in kept.items() if not path.startswith(f"{key}.")}
        joined[key] = {**before, **table}
    return Recipe(name, title, joined, {**kept, **sources}, base.samples, base.name)


_KEYS_OF_LINE = {
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
"""Line name -> the keys of ``[optim]`` it is derived from; its source is that of the first key.
"length" has no keys: it is a warning that a run ends early, which no single setting decides."""


@dataclass(frozen=True, slots=True)
class RecipeLine:
    """One line: the name of a hyper-parameter, its value, its rule and its source."""

    name: str
    value: str
    rule: str
    source: str


class _UnsourcedLine(NamedTuple):
    """A line whose source has not been looked up yet."""

    keys: tuple[str, ...]
    """The dotted keys of the settings it is derived from."""
    name: str
    value: str
    rule: str


def describe_recipe(
    recipe: Recipe, loaded: LoadedConfig[RunConfig], num_samples: int, workers: int
) -> list[RecipeLine]:
    """Return a line for every hyper-parameter of ``loaded``, a run based on ``recipe``."""
    derived = derive_rates(loaded.config, num_samples)
    lines = _batch_lines(loaded.config, derived.epoch_steps, num_samples, workers)
    for line in derived.lines():
        keys = tuple(f"optim.{key}" for key in _KEYS_OF_LINE[line.name])
        lines.append(_UnsourcedLine(keys, line.name, line.value, line.rule))
    lines += _fixed_lines(loaded.config) + _strategy_lines(loaded.config)
    return [
        RecipeLine(line.name, line.value, line.rule, _source_of(recipe, loaded, line.keys))
        for line in lines
    ]


def refusal_reason(config: RunConfig, workers: int) -> str | None:
    """Return why ``workers`` ranks cannot train ``config``, or None if they can.

    Only ``strategy.groups`` as a number is checked: ``"hosts"`` depends on the cluster.
    """
    strategy = config.strategy
    if not isinstance(strategy, GossipConfig) or not isinstance(strategy.groups, int):
        return None
    reason = grouped(strategy.build_topology(), strategy.groups).size_error(workers)
    return f"strategy.groups = {strategy.groups}: {reason}" if reason else None


def _batch_lines(
    config: RunConfig, epoch_steps: int, num_samples: int, workers: int
) -> list[_UnsourcedLine]:
    train = config.train
    share = -(-train.batch // workers)
    num_micro_batches = train.num_micro_batches(workers)
    micro_batch = -(-share // num_micro_batches)
    parts = (
        f"{num_micro_batches} micro-batches of {micro_batch}"
        if num_micro_batches > 1
        else "at once"
    )
    shared = f"{count_text(workers, 'worker')}, {share} each, {parts}"
    length_unit = "epochs" if train.steps is None else "steps"
    length = train.epochs if train.steps is None else train.steps
    epoch = f"an epoch has {train.epoch_samples or num_samples} samples, {epoch_steps} steps"
    return [
        _UnsourcedLine(("train.batch",), "batch", f"{train.batch}", shared),
        _UnsourcedLine(
            ("train.epochs", "train.epoch_samples", "train.steps"), length_unit, f"{length}", epoch
        ),
        _UnsourcedLine(
            ("train.micro_batch",),
            "batch norm",
            f"over {micro_batch}",
            "samples of a worker's micro-batch",
        ),
    ]


def _fixed_lines(config: RunConfig) -> list[_UnsourcedLine]:
    """Return the lines of settings that do not depend on the batch."""
    train, model, data = config.train, config.model, config.data
    smoothing, precision = f"{train.label_smoothing:g}", train.precision
    rest = [
        _UnsourcedLine(("train.label_smoothing",), "label smoothing", smoothing, "on all classes"),
        _UnsourcedLine(("train.precision",), "precision", precision, "weights and updates in fp32"),
    ]
    if train.clip_norm is not None:
        limit, rule = f"{train.clip_norm:g}", "upper limit of the gradient's norm over all layers"
        rest.append(_UnsourcedLine(("train.clip_norm",), "clipping", limit, rule))
    if isinstance(model, ResNetConfig):
        first = "0" if model.zero_gamma else "1"
        rest.append(
            _UnsourcedLine(
                ("model.zero_gamma",), "last gamma", first, "initial value in each block"
            )
        )
        if model.start == "uniform":
            rule = "convolutions and the last layer, scaled by fan-in"
            rest.append(_UnsourcedLine(("model.start",), "first weights", model.start, rule))
    if isinstance(model, AlexNetConfig):
        norm = "a batch norm after the last pooling"
        rest.append(_UnsourcedLine(("model.norm",), "norm", model.norm, norm))
    if data.kind == "images" and data.augment == "area_crop":
        area = f"{data.area[0]:g} to {data.area[1]:g}"
        aspect = f"of the area, aspect {data.aspect[0]:.4g} to {data.aspect[1]:.4g}"
        rest.append(_UnsourcedLine(("data.area", "data.aspect"), "crops", area, aspect))
        if data.plain_from_epoch is not None:
            late = f"at the centre, from epoch {data.plain_from_epoch} on"
            keys = ("data.plain_from_epoch",)
            rest.append(_UnsourcedLine(keys, "late crops", "the largest square", late))
    return rest


def _strategy_lines(config: RunConfig) -> list[_UnsourcedLine]:
    """Return the lines of a gossip strategy; none for other strategies."""
    strategy = config.strategy
    if not isinstance(strategy, GossipConfig):
        return []
    lines = [
        _UnsourcedLine(
            ("strategy.kind",),
            "strategy",
            strategy.kind,
            f"{strategy.mix} are mixed with those of peers",
        ),
        _UnsourcedLine(
            ("strategy.topology",), "peers", strategy.topology, "the peers of a rank in each round"
        ),
        _UnsourcedLine(
            ("strategy.segments",),
            "segments",
            strategy.segments,
            "the parts of the model with peers of their own",
        ),
    ]
    if strategy.groups is not None:
        rule = "consecutive ranks with one model; gossip is between groups"
        lines.append(_UnsourcedLine(("strategy.groups",), "groups", f"{strategy.groups}", rule))
    return lines


def _source_of(recipe: Recipe, loaded: LoadedConfig[RunConfig], keys: Sequence[str]) -> str:
    """Return the source of a line; settings that override the recipe name what set them."""
    if not keys:
        return ""
    changed = {key: how for key in keys if (how := _how_changed(recipe, loaded, key))}
    if keys[0] in changed:
        return changed[keys[0]]
    source, optim = recipe.sources.get(keys[0], ""), loaded.config.optim
    batch = optim.for_batch or loaded.config.train.batch
    if keys[0] == "optim.lr" and optim.reference_batch not in (None, batch):
        rule = "" if "optim.scaling" in changed else recipe.sources.get("optim.scaling", "")
        source = "; ".join(filter(None, [f"derived from {source}", rule]))
    else:
        other_sources = (recipe.sources.get(key, "") for key in keys[1:] if key != "optim.scaling")
        source = "; ".join(dict.fromkeys(filter(None, [source, *other_sources])))
    overridden = [f"{key.rpartition('.')[2]} {how}" for key, how in changed.items()]
    return "; ".join(filter(None, [source, *overridden]))


def _how_changed(recipe: Recipe, loaded: LoadedConfig[RunConfig], key: str) -> str:
    """Return what changed ``key`` from the recipe's value, or "" if it is unchanged.

    Changing the kind of a table resets all its keys that the recipe sets.
    """
    source = loaded.source.get(key, "default")
    if source == "recipe":
        return ""
    if source == "default":
        table, _, name = key.partition(".")
        was_set = key in loaded.source and name in recipe.tables.get(table, {})
        return "reset to its default" if was_set else ""
    return f"set by {'an override' if source == 'override' else source}"
