"""A whole run as one frozen tree, and how its parts are put together."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import nn

from stretto.cluster.world import World
from stretto.comm.channel import Channel
from stretto.comm.codecs import parse_wire
from stretto.config import Config, Loaded, resolve
from stretto.config.text import dotted
from stretto.config.tree import DEFAULT, leaves, mark_table
from stretto.data import DataConfig, Images, ShapesConfig, Source, open_source
from stretto.errors import ConfigError, StrettoError
from stretto.model import CNNConfig, ModelConfig, build_model, per_sample_loss, seeded
from stretto.optim import Derived, OptimConfig, SGDConfig, derive, make_optimizer
from stretto.optim.configs import RateConfig
from stretto.plan.profile import Profile
from stretto.plan.units import called_modules
from stretto.strategy import (
    ADPSGD,
    AllReduceConfig,
    AnyStrategyConfig,
    MakeOptimizer,
    Sharded,
    ShardedConfig,
    Strategy,
    StrategyConfig,
    build_strategy,
    check_strategy,
    chosen_settings,
    remarks,
)
from stretto.strategy.group_norms import GroupNorms, check_sharing
from stretto.strategy.own import OwnModels
from stretto.strategy.sharded.config import unit_bytes
from stretto.telemetry.aside import write_aside
from stretto.telemetry.events import Event
from stretto.telemetry.timeline import Recorder
from stretto.telemetry.trackers import check_trackers
from stretto.train.config import TrainConfig
from stretto.train.early_stop import Watch
from stretto.train.estimated import (
    Ingredients,
    check_estimable,
    estimate_at_start,
    largest_piece,
    needs_estimate,
    own_type,
)
from stretto.train.finetune import InitConfig
from stretto.train.parts import Parts, count_epoch_steps, count_steps
from stretto.train.precision import loss_scale

_TRIED = 2
"""Samples that forward is tried on: more would take large models seconds, on every rank."""


class RunSection(Config):
    """The ``[run]`` table: what the run is called, where it lives, what it may use."""

    name: str = "run"
    """Letters, digits, dot, dash and underscore."""
    folder: str = "runs"
    """The run keeps everything it writes in ``folder/name``."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Weights, order of samples and dropout follow from it."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads per rank; this rank's share of the cores when not set. Part of the numbers:
    runs are bit-equal only at equal threads."""
    timeout_s: float = Field(default=300.0, gt=0)
    """How long a peer may be silent before it counts as lost."""
    silence_s: float = Field(default=30.0, gt=0)
    """A rank not heard of for so long ends the run."""
    trace: bool = True
    """Whether each rank writes its time-line."""
    trackers: tuple[str, ...] = ()
    """Where else events go: "tensorboard", "wandb", "mlflow"."""

    @field_validator("name")
    @classmethod
    def _is_a_plain_name(cls, name: str) -> str:
        if not re.fullmatch(r"\w[\w.-]{0,99}", name):
            raise ValueError("expected letters, digits, dots, dashes and underscores, 100 at most")
        return name


class RunConfig(Config):
    """Everything a run file may say."""

    recipe: str | None = None
    """The published run that this one is laid over, by name; see stretto recipe."""
    run: RunSection = RunSection()
    model: ModelConfig = CNNConfig()
    data: DataConfig = ShapesConfig()
    optim: OptimConfig = SGDConfig()
    strategy: StrategyConfig = AllReduceConfig()
    train: TrainConfig = TrainConfig()
    init: InitConfig = InitConfig()

    @property
    def run_dir(self) -> Path:
        """Where the run keeps everything it writes."""
        return Path(self.run.folder) / self.run.name


@dataclass(frozen=True, slots=True)
class Prepared:
    """Data and model of a run, built and tried on each other."""

    source: Source
    test_source: Source
    model: nn.Module
    calls: tuple[str, ...] | None = None
    """The modules that a forward calls, in the order of their first calls, where it was seen."""


def prepare(config: RunConfig) -> Prepared:
    """Build data and model and try them on each other: mistakes show before anything starts.

    Raises:
        ConfigError: The batch is larger than the data, or the model cannot take its samples.
    """
    check_trackers(config.run.trackers)
    _check_wire(config)
    source = open_source(config.data, train=True)
    if config.train.batch > source.num_samples:
        raise ConfigError(
            f"train.batch = {config.train.batch}: the data has only {source.num_samples} training "
            "samples; lower the batch or take more data"
        )
    _check_classes(config, source)
    derived_for(config, source.num_samples)
    model = build_model(config.model, config.run.seed)
    calls = called_modules(model, lambda: _check_fit(config, model, source))
    check_strategy(config.strategy, model, calls)
    if isinstance(config.strategy, ShardedConfig):
        check_estimable(config.strategy)
    return Prepared(source, open_source(config.data, train=False), model, calls)


def resolve_run(loaded: Loaded[RunConfig], world: World, model: nn.Module) -> Loaded[RunConfig]:
    """Return the config with what the run derives written out: threads, algorithms, bucket cuts.

    Fed back as a run file it gives the same run, bit for bit, on any launcher.
    """
    config = loaded.config
    derived: dict[str, object] = {}
    if config.run.threads is None:
        derived["run.threads"] = world.threads
    chosen = chosen_settings(config.strategy, world.mesh, model)
    derived |= {f"strategy.{key}": value for key, value in chosen.items()}
    return resolve(loaded, derived)


def digest(config: RunConfig) -> str:
    """Return a fingerprint of the settings, the same on every rank of one run."""
    text = config.model_dump_json(exclude={"run": {"folder", "threads"}})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def flat_settings(config: RunConfig) -> dict[str, object]:
    """Return every setting by its dotted key."""
    tree = mark_table(config.model_dump(mode="json"), DEFAULT)
    return {dotted(path): leaf.content for path, leaf in leaves(tree)}


def fixed_settings(loaded: Loaded[RunConfig]) -> dict[str, object]:
    """Return what makes a run this run, by dotted key: model, data, optimizer, seed and batch.

    Its length, its rate, how it is told and stored may change when it is resumed; so may whose
    weights it began with, since the checkpoint has its own.
    """
    whole = loaded.config.model_dump(mode="json")
    free = {"data.path", "data.decoders", "data.bad_limit", "data.cache", "data.cache_size"}
    free |= {"data.cache_folder", *(f"optim.{key}" for key in RateConfig.rate_keys())}
    fixed = {"run.seed": whole["run"]["seed"], "train.batch": whole["train"]["batch"]}
    for table in ("model", "data", "optim"):
        fixed |= {f"{table}.{key}": value for key, value in whole[table].items()}
    return {key: value for key, value in fixed.items() if key not in free}


def assemble(
    loaded: Loaded[RunConfig],
    prepared: Prepared,
    world: World,
    channel: Channel,
    report: Callable[[Event], None],
    generation: int = 0,
) -> Parts:
    """Put together everything the loop needs; all ranks call this together."""
    config = loaded.config
    recorder = Recorder(world.rank)
    chosen, profile = _with_estimate(config, prepared, channel)
    strategy = build_strategy(chosen, channel, recorder, calls=prepared.calls, profile=profile)
    strategy.reads_gradients = config.train.reads_gradients  # a plan that is made now goes by it
    derived = derived_for(config, prepared.source.num_samples)
    notes = [*remarks(config.strategy), *derived.remarks()]
    if isinstance(strategy, Sharded):
        strategy.known = replace(strategy.known, tell=notes.append)
    making = _making(derived, prepared.model, strategy, channel)
    model, optimizer = strategy.attach(prepared.model, making)
    if isinstance(strategy, Sharded) and isinstance(chosen, ShardedConfig) and world.rank == 0:
        plan = strategy.plan.replace(unit_bytes=unit_bytes(chosen))
        write_aside(config.run_dir / "plan.json", plan.to_json() + "\n")
    return Parts(
        config=config.train,
        seed=config.run.seed,
        world=world,
        channel=channel,
        model=model,
        optimizer=optimizer,
        strategy=strategy,
        source=prepared.source,
        test_source=prepared.test_source,
        rate_at=derived.rate_at,
        report=report,
        recorder=recorder,
        notes=notes,
        checkpoints=config.run_dir / "checkpoints",
        generation=generation,
        fixed=fixed_settings(loaded),
        watch=Watch(config.train.early_stop),
        scale=loss_scale(config.train.precision, config.train.loss_scale),
    )


def _making(
    derived: Derived, model: nn.Module, strategy: Strategy, channel: Channel
) -> MakeOptimizer:
    """Return what builds the optimizer, with norms of groups where those differ from a rank's own.

    Raises:
        ConfigError: The ranks cannot be such groups.
    """
    optim, sharing = derived.config, derived.sharing
    if sharing is not None:
        check_sharing(sharing, channel.size)
    if sharing is None or not isinstance(strategy, OwnModels):
        return make_optimizer(optim, model, peak_lr=derived.lr)
    if isinstance(strategy, ADPSGD):
        raise ConfigError(
            f"optim.norm_group = {sharing.width}: ranks of adpsgd wait for nobody's step, and "
            "norms of a group need all of its ranks: leave norm_group out, or take "
            'strategy.kind = "crossover"'
        )
    norms = GroupNorms(strategy, channel, sharing)
    return norms.watching(make_optimizer(optim, model, norms=norms, peak_lr=derived.lr))


def _with_estimate(
    config: RunConfig, prepared: Prepared, channel: Channel
) -> tuple[AnyStrategyConfig, Profile | None]:
    """Return the strategy and, where a plan needs one and no file has it, a profile for it.

    Units are then of the size for which it was estimated, on all ranks.
    """
    strategy = config.strategy
    if not isinstance(strategy, ShardedConfig) or not needs_estimate(strategy):
        return strategy, None
    ingredients = Ingredients(
        model=prepared.model,
        own=own_type(prepared.model),
        batch=largest_piece(config.train, prepared.source, channel.size),
        strategy=strategy,
        optim=config.optim,
        precision=config.train.precision,
        calls=prepared.calls,
    )
    profile = estimate_at_start(ingredients, channel)
    return strategy.model_copy(update={"unit": profile.unit_bytes}), profile


def derived_for(config: RunConfig, num_samples: int) -> Derived:
    """Return the rates of a run over ``num_samples`` training samples, and the rules they follow.

    Neither ranks nor micro-batches enter: a step is a step.
    """
    return derive(
        config.optim,
        batch=config.train.batch,
        epoch_steps=count_epoch_steps(config.train, num_samples),
        total_steps=count_steps(config.train, num_samples),
    )


def _check_wire(config: RunConfig) -> None:
    """Refuse a wire that keeps gradients from step to step while the scale of the loss moves."""
    if config.train.precision == "fp16" and parse_wire(config.strategy.wire).share:
        raise ConfigError(
            f'strategy.wire = "{config.strategy.wire}" keeps what it has not sent for later steps, '
            'and train.precision = "fp16" scales gradients anew in them: take precision "bf16", or '
            "another wire"
        )


def _check_classes(config: RunConfig, source: Source) -> None:
    """Compare class folders with answers, where the model says how many it has."""
    answers = getattr(config.model, "classes", None)
    if not isinstance(source, Images) or answers is None:
        return
    folders = len(source.classes)
    if folders != answers:
        raise ConfigError(
            f"model.classes = {answers}, but data.path has {folders} class folders: set "
            f"model.classes={folders}"
        )


def _check_fit(config: RunConfig, model: nn.Module, source: Source) -> None:
    # From the whole of the data: where samples are sorted by class, all classes should show.
    trial = np.linspace(0, source.num_samples - 1, min(source.num_samples, 64)).astype(np.int64)
    inputs, targets = source.batch(trial)
    if not len(inputs):
        raise ConfigError(
            f"data.kind = {config.data.kind!r}: of {len(trial)} samples tried none could be read: "
            f"{source.take_account().skipped[0].reason}"
        )
    model.eval()
    try:
        # Seeded: a model may draw weights when it first sees data.
        with torch.no_grad(), seeded(config.run.seed):
            outputs = model(inputs[:_TRIED])
            per_sample_loss(outputs, targets[:_TRIED])
            for target in targets.split(1):  # which classes there are, the outputs must know
                per_sample_loss(outputs[:1], target)
    except StrettoError:
        raise
    except Exception as wrong:
        reason = f"{type(wrong).__name__}: {wrong}".splitlines()[0]
        raise ConfigError(
            f"model.kind = {config.model.kind!r} cannot learn data.kind = {config.data.kind!r}: "
            f"a trial on samples of shape {list(inputs.shape[1:])} failed: {reason}"
        ) from wrong
    model.train()
