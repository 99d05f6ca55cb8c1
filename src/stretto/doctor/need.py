"""What a run will ask of the machines, worked out from its settings."""

import torch
from torch import nn

from stretto.data import ImagesConfig
from stretto.doctor.records import Purpose
from stretto.optim import make_optimizer
from stretto.run import RunConfig, prepare
from stretto.units import parse_bytes

CHECKPOINTS = 3
"""The newest one, the one before, and the one that is being written."""

UNKNOWN_NEED_BYTES = parse_bytes("1GB")
"""Room to ask for when no run file tells the model."""


def purpose_of(config: RunConfig, *, model_is_known: bool) -> Purpose:
    """Return what ``config`` needs; ``model_is_known`` tells that a run file was given.

    Raises:
        ConfigError: Data and model of the run cannot be.
    """
    need_bytes, need = UNKNOWN_NEED_BYTES, "a run"
    if model_is_known:
        need_bytes = CHECKPOINTS * checkpoint_bytes(config)
        need = f"{CHECKPOINTS} checkpoints"
    return Purpose(
        folder=str(config.run_dir),
        need_bytes=need_bytes,
        need=need,
        silence_s=config.run.silence_s,
        timeout_s=config.run.timeout_s,
        threads=config.run.threads,
        decoders=config.data.most_decoders if isinstance(config.data, ImagesConfig) else 0,
    )


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the bytes of the run's weights and optimizer state.

    The optimizer makes a step on tensors without contents, so whatever state it keeps is counted.
    """
    model = prepare(config).model.to("meta")
    parameters = list(model.parameters())
    optimizer = make_optimizer(config.optim, model)(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return _num_bytes(model) + sum(v.nbytes for v in kept if isinstance(v, torch.Tensor))


def _num_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())
