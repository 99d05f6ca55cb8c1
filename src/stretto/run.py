"""`RunConfig`, the config of a whole run, and the functions that build a run from it."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import nn

from stretto.cluster.world import Mesh, World
from stretto.collectives.codecs import parse_wire
from stretto.comm.transport import Transport
from stretto.config import Config, LoadedConfig, set_derived_values
from stretto.config.formatting import dotted_key
from stretto.config.tree import SOURCE_DEFAULT, build_table, iter_leaves
from stretto.data import DataConfig, ImageFolder, SampleSource, ShapesConfig, open_sample_source
from stretto.errors import ConfigError, StrettoError
from stretto.models import CNNConfig, ModelConfig, build_model, per_sample_loss, seeded_rng
from stretto.optim import (
    LAMBConfig,
    LARSConfig,
    LearningRateSchedule,
    OptimConfig,
    SGDConfig,
    derive_lr_schedule,
    make_optimizer,
)
from stretto.optim.configs import LearningRateConfig
from stretto.planner.model_units import called_modules
from stretto.planner.profile import Profile
from stretto.program.lowering import ProgramInputs
from stretto.program.step_program import StepProgram
from stretto.strategies import (
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
    warnings,
)
from stretto.strategies.group_trust_ratios import GroupTrustRatioNorms, check_norm_groups
from stretto.strategies.local_state import LocalModelStrategy
from stretto.strategies.programs import lower
from stretto.strategies.sharded.config import unit_bytes
from stretto.telemetry.events import Event
from stretto.telemetry.sinks import write_atomically
from stretto.telemetry.timeline import Recorder
from stretto.telemetry.trackers import check_trackers
from stretto.train.config import TrainConfig
from stretto.train.early_stop import EarlyStopper
from stretto.train.estimate_run import (
    EstimateInputs,
    check_estimable,
    estimate_at_start,
    largest_micro_batch,
    needs_estimate,
    parameter_dtype,
)
from stretto.train.finetune import InitConfig
from stretto.train.precision import loss_scale
from stretto.train.run_parts import RunParts, count_epoch_steps, count_steps

_NUM_TRIAL_SAMPLES = 2
"""Samples of the trial forward pass; more would take seconds for large models, on every rank."""


class RunSection(Config):
    """The ``[run]`` table: name, folder, seed, threads, timeouts and outputs."""

    name: str = "run"
    """Name of the run: up to 100 letters, digits, dots, dashes and underscores."""
    folder: str = "runs"
    """Parent folder: the run writes all its files below ``folder/name``."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of initial weights, order of samples and dropout."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads per rank; each rank's share of the cores when not set. Runs are bit-equal only
    with equal numbers of threads."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that a rank waits for a message of a peer before it treats the peer as lost."""
    heartbeat_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds without a heartbeat of a rank after which the run ends."""
    trace: bool = True
    """Whether each rank writes its timeline as a Chrome trace."""
    trackers: tuple[str, ...] = ()
    """Experiment trackers that also receive events: "tensorboard", "wandb", "mlflow"."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not re.fullmatch(r"\w[\w.-]{0,99}", name):
            raise ValueError("expected letters, digits, dots, dashes and underscores, 100 at most")
        return name


class RunConfig(Config):
    """All settings of a run, as in a run file."""

    recipe: str | None = None
    """Name of the recipe whose settings the run file overrides; ``stretto recipe`` lists them."""
    run: RunSection = RunSection()
    model: ModelConfig = CNNConfig()
    data: DataConfig = ShapesConfig()
    optim: OptimConfig = SGDConfig()
    strategy: StrategyConfig = AllReduceConfig()
    train: TrainConfig = TrainConfig()
    init: InitConfig = InitConfig()

    @property
    def run_dir(self) -> Path:
        """Folder of all files that the run writes."""
        return Path(self.run.folder) / self.run.name


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """Data and model of a run, after a trial forward pass."""

    source: SampleSource
    test_source: SampleSource
    model: nn.Module
    calls: tuple[str, ...] | None = None
    """Modules in the order of their first call in the trial forward pass; None if not recorded."""


def prepare(config: RunConfig) -> PreparedRun:
    """Build data and model and run a trial forward pass, so that mistakes show before the start.

    Raises:
        ConfigError: A setting is invalid, the batch is larger than the data, or the model cannot
            process the samples.
    """
    check_trackers(config.run.trackers)
    _check_wire(config)
    source = open_sample_source(config.data, train=True)
    if config.train.batch > source.num_samples:
        raise ConfigError(
            f"train.batch = {config.train.batch}: the data has only {source.num_samples} training "
            "samples; lower the batch or use more data"
        )
    _check_classes(config, source)
    derive_rates(config, source.num_samples)
    model = build_model(config.model, config.run.seed)
    calls = called_modules(model, lambda: _try_forward(config, model, source))
    check_strategy(config.strategy, model, calls)
    if isinstance(config.strategy, ShardedConfig):
        check_estimable(config.strategy)
    return PreparedRun(source, open_sample_source(config.data, train=False), model, calls)


def program_of(config: RunConfig, mesh: Mesh) -> StepProgram:
    """Return the step program of a run on ``mesh``.

    Raises:
        ConfigError: The run is impossible, on these ranks or at all.
    """
    prepared = prepare(config)
    inputs = ProgramInputs(
        prepared.model,
        mesh,
        prepared.calls,
        config.train.reads_gradients,
        whole_layers=isinstance(config.optim, LARSConfig | LAMBConfig),
    )
    return lower(config.strategy, inputs)


def resolve_run(
    loaded: LoadedConfig[RunConfig], world: World, model: nn.Module
) -> LoadedConfig[RunConfig]:
    """Return the config with derived settings: threads, algorithms and bucket lengths.

    Written as a run file, it gives the same run, bit for bit, under any launcher.
    """
    config = loaded.config
    derived: dict[str, object] = {}
    if config.run.threads is None:
        derived["run.threads"] = world.threads
    chosen = chosen_settings(config.strategy, world.mesh, model)
    derived |= {f"strategy.{key}": value for key, value in chosen.items()}
    return set_derived_values(loaded, derived)


def settings_digest(config: RunConfig) -> str:
    """Return a digest of the settings; all ranks of a run must have the same one."""
    text = config.model_dump_json(exclude={"run": {"folder", "threads"}})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def flat_settings(config: RunConfig) -> dict[str, object]:
    """Return every setting by its dotted key."""
    tree = build_table(config.model_dump(mode="json"), SOURCE_DEFAULT)
    return {dotted_key(path): leaf.content for path, leaf in iter_leaves(tree)}


def fixed_settings(loaded: LoadedConfig[RunConfig]) -> dict[str, object]:
    """Return the settings that a resumption must not change, by dotted key.

    These are model, data, optimizer, seed and batch. A resumption may change the length, the
    learning rate, logging, storage, and ``[init]``, because the checkpoint has the weights.
    """
    tables = loaded.config.model_dump(mode="json")
    changeable = {
        "data.path",
        "data.decoders",
        "data.max_corrupt_files",
        "data.cache",
        "data.cache_size",
    }
    changeable |= {"data.cache_folder", *(f"optim.{key}" for key in LearningRateConfig.rate_keys())}
    fixed_settings = {"run.seed": tables["run"]["seed"], "train.batch": tables["train"]["batch"]}
    for table in ("model", "data", "optim"):
        fixed_settings |= {f"{table}.{key}": value for key, value in tables[table].items()}
    return {key: value for key, value in fixed_settings.items() if key not in changeable}


def assemble(
    loaded: LoadedConfig[RunConfig],
    prepared: PreparedRun,
    world: World,
    transport: Transport,
    report: Callable[[Event], None],
    generation: int = 0,
) -> RunParts:
    """Build everything that the training loop needs; collective: all ranks call it together."""
    config = loaded.config
    recorder = Recorder(world.rank)
    chosen, profile = _estimate_if_needed(config, prepared, transport)
    strategy = build_strategy(chosen, transport, recorder, calls=prepared.calls, profile=profile)
    strategy.reads_gradients = config.train.reads_gradients  # before attach, which plans with it
    derived = derive_rates(config, prepared.source.num_samples)
    notes = [*warnings(config.strategy), *derived.warnings()]
    if isinstance(strategy, Sharded):
        strategy.model_info = replace(strategy.model_info, report_plan=notes.append)
    optimizer_factory = _optimizer_factory(derived, prepared.model, strategy, transport)
    model, optimizer = strategy.attach(prepared.model, optimizer_factory)
    if isinstance(strategy, Sharded) and isinstance(chosen, ShardedConfig) and world.rank == 0:
        plan = strategy.plan.replace(unit_bytes=unit_bytes(chosen))
        write_atomically(config.run_dir / "plan.json", plan.to_json() + "\n")
    return RunParts(
        config=config.train,
        seed=config.run.seed,
        world=world,
        transport=transport,
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
        fixed_settings=fixed_settings(loaded),
        early_stopper=EarlyStopper(config.train.early_stop),
        loss_scale=loss_scale(config.train.precision, config.train.loss_scale),
    )


def _optimizer_factory(
    derived: LearningRateSchedule, model: nn.Module, strategy: Strategy, transport: Transport
) -> MakeOptimizer:
    """Return a function that builds the optimizer, with norms over groups of ranks if configured.

    Raises:
        ConfigError: The ranks cannot form such groups, or the strategy does not support them.
    """
    optim, norm_sharing = derived.config, derived.norm_sharing
    if norm_sharing is not None:
        check_norm_groups(norm_sharing, transport.size)
    if norm_sharing is None or not isinstance(strategy, LocalModelStrategy):
        return make_optimizer(optim, model, peak_lr=derived.lr)
    if isinstance(strategy, ADPSGD):
        raise ConfigError(
            f"optim.norm_group = {norm_sharing.group_size}: "
            "ranks of adpsgd wait for nobody's step, and norms of a group need all of its ranks: "
            "remove norm_group, or set "
            'strategy.kind = "crossover"'
        )
    norms = GroupTrustRatioNorms(strategy, transport, norm_sharing)
    return norms.with_trust_ratio_norms(
        make_optimizer(optim, model, norms=norms, peak_lr=derived.lr)
    )


def _estimate_if_needed(
    config: RunConfig, prepared: PreparedRun, transport: Transport
) -> tuple[AnyStrategyConfig, Profile | None]:
    """Return the strategy config and, if its plan needs one and has no file, an estimated profile.

    The returned config then has the unit size of the estimate, on all ranks.
    """
    strategy = config.strategy
    if not isinstance(strategy, ShardedConfig) or not needs_estimate(strategy):
        return strategy, None
    estimate_inputs = EstimateInputs(
        model=prepared.model,
        parameter_dtype=parameter_dtype(prepared.model),
        batch=largest_micro_batch(config.train, prepared.source, transport.size),
        strategy=strategy,
        optim=config.optim,
        precision=config.train.precision,
        calls=prepared.calls,
    )
    profile = estimate_at_start(estimate_inputs, transport)
    return strategy.model_copy(update={"unit": profile.unit_bytes}), profile


def derive_rates(config: RunConfig, num_samples: int) -> LearningRateSchedule:
    """Return the learning rates of a run over ``num_samples`` training samples, with their rules.

    They depend on steps only, not on the number of ranks or micro-batches.
    """
    return derive_lr_schedule(
        config.optim,
        batch=config.train.batch,
        epoch_steps=count_epoch_steps(config.train, num_samples),
        total_steps=count_steps(config.train, num_samples),
    )


def _check_wire(config: RunConfig) -> None:
    """Refuse a codec with error feedback together with fp16, whose loss scale changes by step."""
    if config.train.precision == "fp16" and parse_wire(config.strategy.wire).kept_fraction:
        raise ConfigError(
            f'strategy.wire = "{config.strategy.wire}" keeps what it has not sent for later steps, '
            'but train.precision = "fp16" can change the scale of gradients in them: use precision '
            '"bf16", or another wire'
        )


def _check_classes(config: RunConfig, source: SampleSource) -> None:
    """Raise ConfigError unless the model has as many classes as the data has class folders."""
    num_classes = getattr(config.model, "classes", None)
    if not isinstance(source, ImageFolder) or num_classes is None:
        return
    num_folders = len(source.classes)
    if num_folders != num_classes:
        raise ConfigError(
            f"model.classes = {num_classes}, but data.path has {num_folders} class folders: set "
            f"model.classes={num_folders}"
        )


def _try_forward(config: RunConfig, model: nn.Module, source: SampleSource) -> None:
    # Samples from all parts of the data: if it is sorted by class, many classes must appear.
    trial = np.linspace(0, source.num_samples - 1, min(source.num_samples, 64)).astype(np.int64)
    inputs, targets = source.batch(trial)
    if not len(inputs):
        raise ConfigError(
            f"data.kind = {config.data.kind!r}: none of {len(trial)} trial samples could be read: "
            f"{source.take_statistics().skipped[0].reason}"
        )
    model.eval()
    try:
        # Seeded, because a lazy model initialises weights at its first forward pass.
        with torch.no_grad(), seeded_rng(config.run.seed):
            outputs = model(inputs[:_NUM_TRIAL_SAMPLES])
            per_sample_loss(outputs, targets[:_NUM_TRIAL_SAMPLES])
            for target in targets.split(1):  # every target must be a class of the output
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
