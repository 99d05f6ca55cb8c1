"""Fine-tuning: export a model's backbone, and start a run from the weights of an earlier one.

Every tensor of the model must either be loaded, with an equal shape, or be declared newly
initialised by the run file. A backbone file declares its missing head by itself.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self, TypeAlias

import torch
from pydantic import TypeAdapter, ValidationError, model_validator
from torch import Tensor, nn

from stretto.checkpoint import (
    Backbone,
    CheckpointState,
    find_and_load,
    load_backbone,
    save_backbone,
)
from stretto.checkpoint.tensor_files import BACKBONE_SUFFIX
from stretto.comm.broadcast import broadcast_, broadcast_text
from stretto.config import Config
from stretto.config.formatting import did_you_mean, toml_value
from stretto.errors import CheckpointError, ConfigError, StrettoError
from stretto.models import AnyModelConfig, ModelConfig, ResNet, build_model, head_layer_names
from stretto.models.backbone import belongs_to_layers, from_torchvision, has_torchvision_names
from stretto.train.run_parts import RunParts

_TABLE: TypeAdapter[AnyModelConfig] = TypeAdapter(ModelConfig)


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """What `export_backbone` wrote."""

    path: Path
    source: Path
    """The checkpoint that was read."""
    step: int
    num_tensors: int
    num_bytes: int
    """Size of the file."""
    head: tuple[str, ...]
    """Layers that were left out."""


def export_backbone(location: Path, out: Path, *, log: Callable[[str], None]) -> ExportSummary:
    """Write a run's weights without its head to the new file ``out``.

    Args:
        location: A run's folder, its folder of checkpoints, or one checkpoint, as for
            `find_and_load`.
        out: A name that ends in ``.safetensors``, which ``init.checkpoint`` then accepts.
        log: Called with one line for each damaged checkpoint that was skipped.
    """
    if out.suffix != BACKBONE_SUFFIX:
        raise ConfigError(f"{out}: a backbone file's name ends in {BACKBONE_SUFFIX}")
    if out.exists():
        raise ConfigError(f"{out} is there already: delete it, or choose another name")
    source, state = find_and_load(location, log=log)
    config = _model_table(source, state)
    head = head_layer_names(build_model(config, seed=0))
    full_state = state.tensors_under("model")
    kept = {
        name: tensor for name, tensor in full_state.items() if not belongs_to_layers(name, head)
    }
    if not kept or len(kept) == len(full_state):
        raise CheckpointError(
            f"{source}: no last layer is found that could be left out of the model; another run "
            "can begin with the checkpoint as it is, see init.checkpoint and init.newly_initialised"
        )
    backbone = Backbone(kept, config.model_dump(mode="json"), head, state.step)
    num_bytes = save_backbone(out, backbone)
    return ExportSummary(out, source, state.step, len(kept), num_bytes, head)


def _model_table(source: Path, state: CheckpointState) -> AnyModelConfig:
    """Return the ``[model]`` table that the run stored in its checkpoint."""
    fixed_settings = state.facts.get("fixed", {})
    table = {
        key.removeprefix("model."): fixed_settings[key]
        for key in fixed_settings
        if key.startswith("model.")
    }
    try:
        return _TABLE.validate_json(json.dumps(table))
    except ValidationError as wrong:
        first = wrong.errors(include_url=False, include_input=False)[0]
        key = ".".join(["model", *(str(part) for part in first["loc"][1:])])
        raise CheckpointError(
            f"{source} does not hold a model table that can be built here: {key}: {first['msg']}"
        ) from None


Shapes: TypeAlias = Mapping[str, Sequence[int]]
"""Shapes of tensors by name."""

_MAX_LISTED = 4
"""Mismatches that a message lists; a wrong model has as many as tensors."""


class InitConfig(Config):
    """The ``[init]`` table: initial weights from another run; a resumed run ignores it."""

    checkpoint: str | None = None
    """A run's folder or its folder of checkpoints (the newest valid one is used), one checkpoint,
    or a file of tensors by name (.safetensors; for a resnet also with torchvision's or timm's
    names). A relative path counts from the working directory.
    """
    newly_initialised: tuple[str, ...] = ()
    """Tensors that are not loaded, by name or pattern: "head.*" if the number of classes differs. A
    backbone file has no head, so its head needs no entry.
    """

    @model_validator(mode="after")
    def _require_checkpoint(self) -> Self:
        if self.newly_initialised and self.checkpoint is None:
            raise ValueError(
                "newly_initialised without checkpoint: all weights are new then; leave it out"
            )
        return self


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """Where the initial weights of a run came from."""

    path: str = ""
    """The checkpoint or file; empty if all weights are newly initialised."""
    num_loaded: int = 0
    num_new: int = 0

    @property
    def note(self) -> str:
        """The line about it in the run's first event."""
        if not self.path:
            return ""
        plural = "" if self.num_new == 1 else "s"
        return f"weights from {self.path}, {self.num_new} tensor{plural} newly initialised"


def check_init(init: InitConfig, model: nn.Module, log: Callable[[str], None]) -> None:
    """Raise `ConfigError` if ``model`` cannot be initialised as ``init`` says; change nothing."""
    if init.checkpoint is not None:
        _select_tensors(init, model, log)


def init_from_checkpoint(
    parts: RunParts, init: InitConfig, log: Callable[[str], None]
) -> InitialWeights:
    """Load the weights that ``init`` names into the model, before the first step.

    Rank 0 reads the file and broadcasts every byte, so disks need not be shared. All ranks call
    this together and fail together.
    """
    if init.checkpoint is None:
        return InitialWeights()
    answer: dict[str, Any] = {}
    if parts.transport.rank == 0:
        try:
            answer = asdict(_load_weights_(init, parts.model, log))
        except StrettoError as wrong:
            answer = {"wrong": str(wrong)}
    answer = json.loads(broadcast_text(json.dumps(answer), parts.transport))
    if "wrong" in answer:
        raise ConfigError(answer["wrong"])
    broadcast_([*parts.model.parameters(), *parts.model.buffers()], parts.transport)
    return InitialWeights(**answer)


def loadable_names(
    model: Shapes, stored: Shapes, new: Sequence[str], head: Sequence[str] = ()
) -> list[str]:
    """Return the names to load: in both, matched by no pattern of ``new`` and not part of ``head``.

    Args:
        model: The tensors of the model.
        stored: The tensors of the checkpoint.
        new: Patterns of tensors that are newly initialised.
        head: Layers that the checkpoint leaves out.

    Raises:
        ConfigError: A tensor does not fit and is not declared newly initialised, a pattern matches
            no tensor, or nothing is left to load.
    """
    names = list(dict.fromkeys([*model, *stored]))
    _refuse_unmatched_patterns(new, names)
    declared = _matching(names, new) | {name for name in names if belongs_to_layers(name, head)}
    mismatches = {
        name: description for name in names if (description := _mismatch(name, model, stored))
    }
    loaded = [name for name in names if name not in mismatches and name not in declared]
    offending = [name for name in mismatches if name not in declared]
    if not loaded:
        raise ConfigError(
            "no tensor is left to load: the checkpoint is another model's, or "
            "init.newly_initialised matches every tensor"
        )
    if offending:
        description = "; ".join(mismatches[name] for name in offending[:_MAX_LISTED])
        more = f"; and {len(offending) - _MAX_LISTED} more" if len(offending) > _MAX_LISTED else ""
        line = toml_value([*new, *_patterns(offending, names, declared)])
        raise ConfigError(
            f"{description}{more}; to leave out what does not fit: init.newly_initialised={line}"
        )
    return loaded


def _load_weights_(
    init: InitConfig, model: nn.Module, log: Callable[[str], None]
) -> InitialWeights:
    path, loaded = _select_tensors(init, model, log)
    state = model.state_dict()
    model.load_state_dict(state | loaded)
    return InitialWeights(str(path), len(loaded), len(state) - len(loaded))


def _select_tensors(
    init: InitConfig, model: nn.Module, log: Callable[[str], None]
) -> tuple[Path, dict[str, Tensor]]:
    """Return the path of the checkpoint that ``init`` names, and the tensors to load from it."""
    location = Path(init.checkpoint or "").expanduser()
    state = model.state_dict(keep_vars=True)
    try:
        path, backbone = _read_weights(location, log)
        stored = dict(backbone.tensors)
        if isinstance(model, ResNet) and has_torchvision_names(stored):
            stored = from_torchvision(stored)
        names = loadable_names(
            _shapes(state), _shapes(stored), init.newly_initialised, backbone.head
        )
        loaded = {name: stored[name] for name in names}
        _refuse_conflicting_ties(state, loaded, init.newly_initialised)
    except StrettoError as wrong:
        raise ConfigError(f"init.checkpoint = {toml_value(init.checkpoint)}: {wrong}") from wrong
    return path, loaded


def _read_weights(location: Path, log: Callable[[str], None]) -> tuple[Path, Backbone]:
    """Return the weights that ``location`` names, and the exact path."""
    if location.suffix == BACKBONE_SUFFIX and not location.is_dir():
        return location, load_backbone(location)
    path, state = find_and_load(location, log=log)
    return path, Backbone(state.tensors_under("model"), step=state.step)


def _refuse_conflicting_ties(
    model: Mapping[str, Tensor], loaded: Mapping[str, Tensor], new: Sequence[str]
) -> None:
    """Refuse tensors that the model ties but that have different values in the checkpoint."""
    named: dict[int, str] = {}
    for name, value in loaded.items():
        first = named.setdefault(id(model[name]), name)
        if name != first and not torch.equal(value, loaded[first]):
            raise ConfigError(
                f"{first} and {name} are one tensor in the model and differ in the checkpoint; "
                f"leave one of them out: init.newly_initialised={toml_value([*new, name])}"
            )


def _refuse_unmatched_patterns(new: Sequence[str], names: Sequence[str]) -> None:
    for pattern in new:
        if not _matching(names, [pattern]):
            raise ConfigError(
                f"no tensor has a name that {toml_value(pattern)} in init.newly_initialised matches"
                f"{did_you_mean(pattern, names)}"
            )


def _mismatch(name: str, model: Shapes, stored: Shapes) -> str:
    """Return why ``name`` cannot be loaded, or ""."""
    if name not in stored:
        return f"{name} {list(model[name])} is not in the checkpoint"
    if name not in model:
        return f"{name} {list(stored[name])} is not in the model"
    if list(model[name]) != list(stored[name]):
        return f"{name} is {list(model[name])} in the model, {list(stored[name])} in the checkpoint"
    return ""


def _patterns(offending: Sequence[str], names: Sequence[str], declared: set[str]) -> list[str]:
    """Return patterns that match ``offending`` and no loadable tensor."""
    patterns: dict[str, None] = {}
    for name in offending:
        module = name.rpartition(".")[0]
        inside = [other for other in names if module and other.startswith(f"{module}.")]
        is_whole_module = bool(inside) and declared.issuperset(set(inside) - set(offending))
        patterns[f"{module}.*" if is_whole_module else name] = None
    return list(patterns)


def _matching(names: Collection[str], patterns: Sequence[str]) -> set[str]:
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}
