"""A trained model without its head, taken out of a run: what another run begins with."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from stretto.checkpoint import Backbone, State, load_at, save_backbone
from stretto.checkpoint.backbone import SUFFIX
from stretto.errors import CheckpointError, ConfigError
from stretto.model import AnyModelConfig, ModelConfig, build_model, head_of
from stretto.model.backbone import is_inside

_TABLE: TypeAdapter[AnyModelConfig] = TypeAdapter(ModelConfig)


@dataclass(frozen=True, slots=True)
class Exported:
    """What a backbone file was made of."""

    path: Path
    source: Path
    """The checkpoint."""
    step: int
    num_tensors: int
    num_bytes: int
    """Of the file."""
    head: tuple[str, ...]
    """Layers that were left out."""


def export_backbone(place: Path, out: Path, *, log: Callable[[str], None]) -> Exported:
    """Write a run's weights without its head to the new file ``out``.

    Args:
        place: A run's folder, its folder of checkpoints, or one checkpoint, as for `load_at`.
        out: A name that ends in ``.safetensors``, which ``init.checkpoint`` then takes.
        log: Told of damaged checkpoints that were passed over.
    """
    if out.suffix != SUFFIX:
        raise ConfigError(f"{out}: a backbone file's name ends in {SUFFIX}")
    if out.exists():
        raise ConfigError(f"{out} is there already: delete it, or choose another name")
    source, state = load_at(place, log=log)
    config = _model_table(source, state)
    head = head_of(build_model(config, seed=0))
    whole = state.under("model")
    kept = {name: tensor for name, tensor in whole.items() if not is_inside(name, head)}
    if not kept or len(kept) == len(whole):
        raise CheckpointError(
            f"{source}: no last layer is found that could be left out of the model; another run "
            "can begin with the checkpoint as it is, see init.checkpoint and init.fresh"
        )
    backbone = Backbone(kept, config.model_dump(mode="json"), head, state.step)
    num_bytes = save_backbone(out, backbone)
    return Exported(out, source, state.step, len(kept), num_bytes, head)


def _model_table(source: Path, state: State) -> AnyModelConfig:
    """Return the model table that the run wrote into its checkpoint."""
    fixed = state.facts.get("fixed", {})
    table = {key.removeprefix("model."): fixed[key] for key in fixed if key.startswith("model.")}
    try:
        return _TABLE.validate_json(json.dumps(table))
    except ValidationError as wrong:
        first = wrong.errors(include_url=False, include_input=False)[0]
        key = ".".join(["model", *(str(part) for part in first["loc"][1:])])
        raise CheckpointError(
            f"{source} does not tell a model table that can be built here: {key}: {first['msg']}"
        ) from None
