"""Fine-tuning: a run that begins with the weights of an earlier one; all else is its own.

Nothing is left to chance or silence: each tensor of the model is either taken over, with equal
shape, or declared fresh by the run file. A backbone file declares its head fresh by itself.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self, TypeAlias

import torch
from pydantic import model_validator
from torch import Tensor, nn

from stretto.checkpoint import Backbone, load_at, load_backbone
from stretto.checkpoint.backbone import SUFFIX
from stretto.comm.spread import spread_from_rank_0_, spread_text
from stretto.config import Config
from stretto.config.text import nearest, toml_value
from stretto.errors import ConfigError, StrettoError
from stretto.model import ResNet
from stretto.model.backbone import is_inside
from stretto.model.names import from_torchvision, has_torchvision_names
from stretto.train.parts import Parts

Shapes: TypeAlias = Mapping[str, Sequence[int]]
"""Of tensors, by name."""

_NAMED = 4
"""Misfits that a message names; there are as many as tensors where the model is another one."""


class InitConfig(Config):
    """The ``[init]`` table: whose weights a run begins with; a resumed run has its own."""

    checkpoint: str | None = None
    """A run's folder or its folder of checkpoints (the newest valid one is taken), one
    checkpoint, or a file of tensors by name (.safetensors; for a resnet also with torchvision's
    or timm's names); a relative path counts from the working directory."""
    fresh: tuple[str, ...] = ()
    """Tensors not taken over, by name or pattern: "head.*" where there are other classes. A
    backbone file has no head, and needs no word about it."""

    @model_validator(mode="after")
    def _fresh_beside_what(self) -> Self:
        if self.fresh and self.checkpoint is None:
            raise ValueError("fresh without checkpoint: all weights are fresh then; leave it out")
        return self


@dataclass(frozen=True, slots=True)
class Start:
    """Where the weights that a run begins with came from."""

    path: str = ""
    """The checkpoint or file; empty where all weights are fresh."""
    num_taken: int = 0
    num_fresh: int = 0

    @property
    def note(self) -> str:
        """What the run's first word says of it."""
        if not self.path:
            return ""
        plural = "" if self.num_fresh == 1 else "s"
        return f"weights from {self.path}, {self.num_fresh} tensor{plural} fresh"


def check_init(init: InitConfig, model: nn.Module, log: Callable[[str], None]) -> None:
    """Raise `ConfigError` where ``model`` cannot begin as ``init`` says; change nothing."""
    if init.checkpoint is not None:
        _fitting(init, model, log)


def take_over_(parts: Parts, init: InitConfig, log: Callable[[str], None]) -> Start:
    """Put the weights that ``init`` names into the model, before the first step.

    Rank 0 reads and the others get every byte from it: disks need not be shared. All ranks
    call this together, and fail together.
    """
    if init.checkpoint is None:
        return Start()
    answer: dict[str, Any] = {}
    if parts.channel.rank == 0:
        try:
            answer = asdict(_load_(init, parts.model, log))
        except StrettoError as wrong:
            answer = {"wrong": str(wrong)}
    answer = json.loads(spread_text(json.dumps(answer), parts.channel))
    if "wrong" in answer:
        raise ConfigError(answer["wrong"])
    spread_from_rank_0_([*parts.model.parameters(), *parts.model.buffers()], parts.channel)
    return Start(**answer)


def taken_names(
    model: Shapes, stored: Shapes, fresh: Sequence[str], head: Sequence[str] = ()
) -> list[str]:
    """Return the tensors that both have, no pattern of ``fresh`` matches and no ``head`` holds.

    Raises:
        ConfigError: A tensor fits nothing and is not declared fresh, a pattern matches no tensor,
            or there is nothing to take over.
    """
    names = list(dict.fromkeys([*model, *stored]))
    _refuse_idle(fresh, names)
    declared = _matching(names, fresh) | {name for name in names if is_inside(name, head)}
    misfits = {name: told for name in names if (told := _misfit(name, model, stored))}
    taken = [name for name in names if name not in misfits and name not in declared]
    offending = [name for name in misfits if name not in declared]
    if not taken:
        raise ConfigError(
            "nothing is left to take over: the checkpoint is another model's, or init.fresh "
            "matches every tensor"
        )
    if offending:
        told = "; ".join(misfits[name] for name in offending[:_NAMED])
        more = f"; and {len(offending) - _NAMED} more" if len(offending) > _NAMED else ""
        line = toml_value([*fresh, *_patterns(offending, names, declared)])
        raise ConfigError(f"{told}{more}; to leave out what does not fit: init.fresh={line}")
    return taken


def _load_(init: InitConfig, model: nn.Module, log: Callable[[str], None]) -> Start:
    path, taken = _fitting(init, model, log)
    state = model.state_dict()
    model.load_state_dict(state | taken)
    return Start(str(path), len(taken), len(state) - len(taken))


def _fitting(
    init: InitConfig, model: nn.Module, log: Callable[[str], None]
) -> tuple[Path, dict[str, Tensor]]:
    """Return the checkpoint that ``init`` means, and what ``model`` takes over from it."""
    place = Path(init.checkpoint or "").expanduser()
    state = model.state_dict(keep_vars=True)
    try:
        path, found = _found(place, log)
        stored = dict(found.tensors)
        if isinstance(model, ResNet) and has_torchvision_names(stored):
            stored = from_torchvision(stored)
        names = taken_names(_shapes(state), _shapes(stored), init.fresh, found.head)
        taken = {name: stored[name] for name in names}
        _refuse_torn(state, taken, init.fresh)
    except StrettoError as wrong:
        raise ConfigError(f"init.checkpoint = {toml_value(init.checkpoint)}: {wrong}") from wrong
    return path, taken


def _found(place: Path, log: Callable[[str], None]) -> tuple[Path, Backbone]:
    """Return the weights that ``place`` means, and where exactly they lie."""
    if place.suffix == SUFFIX and not place.is_dir():
        return place, load_backbone(place)
    path, state = load_at(place, log=log)
    return path, Backbone(state.under("model"), step=state.step)


def _refuse_torn(
    model: Mapping[str, Tensor], taken: Mapping[str, Tensor], fresh: Sequence[str]
) -> None:
    """Refuse two values for one tensor: names that the model ties and the other run did not."""
    named: dict[int, str] = {}
    for name, value in taken.items():
        first = named.setdefault(id(model[name]), name)
        if name != first and not torch.equal(value, taken[first]):
            raise ConfigError(
                f"{first} and {name} are one tensor in the model and differ in the checkpoint; "
                f"leave one of them out: init.fresh={toml_value([*fresh, name])}"
            )


def _refuse_idle(fresh: Sequence[str], names: Sequence[str]) -> None:
    for pattern in fresh:
        if not _matching(names, [pattern]):
            raise ConfigError(
                f"no tensor has a name that {toml_value(pattern)} in init.fresh matches"
                f"{nearest(pattern, names)}"
            )


def _misfit(name: str, model: Shapes, stored: Shapes) -> str:
    """Return why ``name`` cannot be taken over, or nothing."""
    if name not in stored:
        return f"{name} {list(model[name])} is not in the checkpoint"
    if name not in model:
        return f"{name} {list(stored[name])} is not in the model"
    if list(model[name]) != list(stored[name]):
        return f"{name} is {list(model[name])} in the model, {list(stored[name])} in the checkpoint"
    return ""


def _patterns(offending: Sequence[str], names: Sequence[str], declared: set[str]) -> list[str]:
    """Return patterns that match ``offending`` and nothing that could be taken over."""
    patterns: dict[str, None] = {}
    for name in offending:
        module = name.rpartition(".")[0]
        inside = [other for other in names if module and other.startswith(f"{module}.")]
        whole = bool(inside) and declared.issuperset(set(inside) - set(offending))
        patterns[f"{module}.*" if whole else name] = None
    return list(patterns)


def _matching(names: Collection[str], patterns: Sequence[str]) -> set[str]:
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}
