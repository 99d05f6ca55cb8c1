"""How long a training step takes: ours, DDP at its best, no communication, and the bound."""

import copy
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.cluster.world import World
from stretto.comm.channel import Channel
from stretto.comm.codecs import parse_wire
from stretto.comm.connect import connect
from stretto.data import open_source
from stretto.measure.ddp import BUCKET_CAPS_MB, Peers
from stretto.measure.interleave import Row, interleave, spread
from stretto.model import GPTConfig, build_model, per_sample_loss
from stretto.optim import make_optimizer
from stretto.run import RunConfig
from stretto.strategy import build_strategy


def bench_step(
    config: RunConfig, world: World, *, runs: int, say: Callable[[str], None]
) -> list[Row]:
    """Time a step of every contender, interleaved; all ranks call this together."""
    torch.set_num_threads(config.run.threads or world.threads)
    channel = connect(world, config.run.timeout_s)
    model = build_model(config.model, config.run.seed)
    batch = _fixed_batch(config, world)
    ours = _Ours(config, channel, model, batch)
    contenders: dict[str, Callable[[], None]] = {
        "no communication": _Plain(config, copy.deepcopy(model), batch),
        config.strategy.kind: ours,
    }
    with Peers(world) as peers:
        for cap in BUCKET_CAPS_MB:
            wrapped = peers.ddp(copy.deepcopy(model), cap)
            contenders[f"ddp {cap} MB"] = _Plain(config, wrapped, batch)
        times = interleave(contenders, channel, runs=runs, say=say)
    ours.close()
    channel.close()
    return _rows(config, world, model, times)


def bound_s(num_bytes: float | None, compute_s: float, world: World) -> float | None:
    """Return max(compute, bytes every host's link must carry / rate), where both are known."""
    if world.link_bits_per_s is None or num_bytes is None:
        return None
    hosts = world.mesh.hosts
    return max(compute_s, 2 * (hosts - 1) / hosts * num_bytes * 8 / world.link_bits_per_s)


def _rows(
    config: RunConfig, world: World, model: nn.Module, times: dict[str, list[float]]
) -> list[Row]:
    medians = {name: statistics.median(values) for name, values in times.items()}
    tuned = min((name for name in times if name.startswith("ddp")), key=medians.__getitem__)
    others = [name for name in times if name != config.strategy.kind]
    tuned_first = sorted(others, key=lambda name: name != tuned)
    peers = {name + " (tuned)" * (name == tuned): medians[name] for name in tuned_first}
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    ours = times[config.strategy.kind]
    shape = f"{world.mesh.hosts}x{world.mesh.ranks_per_host[0]}"
    case = f"{config.model.kind} {num_bytes / 1e6:.1f} MB, {shape}"
    bound = bound_s(_wire_bytes(config, model), medians["no communication"], world)
    return [
        Row(case, statistics.median(ours), name, seconds, bound, len(ours), spread(ours))
        for name, seconds in peers.items()
    ]


def _wire_bytes(config: RunConfig, model: nn.Module) -> float | None:
    """Return the bytes of all gradients as they travel; None where they do not travel whole."""
    wire = parse_wire(config.strategy.wire)
    if wire.share is not None:
        return None
    if wire.codec is not None:
        return sum(wire.codec.num_bytes([p.numel()]) for p in model.parameters())
    return sum(p.numel() * (wire.dtype or p.dtype).itemsize for p in model.parameters())


Batch = tuple[Tensor, Tensor]


class _Plain:
    """An ordinary PyTorch step; what DDP adds happens inside backward."""

    def __init__(self, config: RunConfig, model: nn.Module, batch: Batch) -> None:
        self._model = model
        self._optimizer: Optimizer = make_optimizer(config.optim, model)(model.parameters())
        self._batch = batch

    def __call__(self) -> None:
        inputs, targets = self._batch
        self._optimizer.zero_grad(set_to_none=True)
        per_sample_loss(self._model(inputs), targets).mean().backward()
        self._optimizer.step()


class _Ours:
    """The same step with a strategy's moments in place."""

    def __init__(self, config: RunConfig, channel: Channel, model: nn.Module, batch: Batch) -> None:
        self._strategy = build_strategy(config.strategy, channel)
        own = copy.deepcopy(model)
        self._model, self._optimizer = self._strategy.attach(own, make_optimizer(config.optim, own))
        self._batch = batch
        self._size = channel.size
        self._step = 0

    def __call__(self) -> None:
        inputs, targets = self._batch
        self._optimizer.zero_grad(set_to_none=True)
        self._strategy.begin(self._step, 0, True, lr=0.0)
        (per_sample_loss(self._model(inputs), targets).mean() / self._size).backward()
        self._strategy.after_backward()
        self._optimizer.step()
        self._strategy.after_update()
        self._step += 1

    def close(self) -> None:
        """End the strategy's thread."""
        self._strategy.close()


def _fixed_batch(config: RunConfig, world: World) -> Batch:
    """Return one rank's share of a batch, made up: what is timed is not the input pipeline."""
    per_rank = max(1, config.train.batch // world.size)
    if isinstance(config.model, GPTConfig):
        shape = (per_rank, config.model.context + 1)
        generator = torch.Generator().manual_seed(world.rank)
        tokens = torch.randint(config.model.vocab, shape, generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    return open_source(config.data, train=True).batch(torch.arange(per_rank).numpy())
