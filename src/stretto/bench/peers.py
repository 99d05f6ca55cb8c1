"""The steps to benchmark: Stretto's, DDP's, FSDP2's, and one without communication."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, HashStore, PrefixStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stretto.cluster.rendezvous import rendezvous
from stretto.cluster.world import World
from stretto.collectives.codecs import WIRE_DTYPES
from stretto.comm.transport import Transport
from stretto.config.formatting import suggest_known_name
from stretto.errors import ConfigError
from stretto.models import per_sample_loss
from stretto.optim import make_optimizer
from stretto.planner.model_units import called_modules, find_units
from stretto.planner.plan import Plan
from stretto.planner.presets import add_barrier
from stretto.profiler.interleaved_timing import StepRunner
from stretto.run import RunConfig
from stretto.strategies import AnyStrategyConfig, Sharded, build_strategy
from stretto.strategies.sharded.config import ShardedConfig, unit_bytes
from stretto.train.precision import HALF_DTYPES

BUCKET_CAPS_MB = (1, 2, 4, 8, 25)
"""The bucket sizes that DDP is timed with, to compare with the best; its default is 25."""
_group_numbers = count()
"""Numbers the process groups; all ranks create the same groups in the same order."""


class PeerProcessGroup:
    """A context with the default process group of `torch.distributed`, which only peers use."""

    def __init__(self, world: World, device: str = "cpu", *, fake: bool = False) -> None:
        """Connect to the other ranks; with ``fake``, make a group that sends nothing."""
        self._is_fake = fake
        if fake:
            import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the back end
        # Each group has its own prefix, because keys of earlier groups are still in the store.
        name = f"peers/{next(_group_numbers)}"
        store = HashStore() if fake else PrefixStore(name, rendezvous(world).store)
        back_end = "fake" if fake else "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(back_end, store=store, rank=world.rank, world_size=world.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        dist.destroy_process_group()

    def ddp(self, model: nn.Module, bucket_cap_mb: int, *, half: bool = False) -> nn.Module:
        """Return ``model`` in DDP with gradients as bucket views; ``half`` sends them as bf16."""
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True
        )
        if self._is_fake:
            wrapped.register_comm_hook(None, _bf16_no_op_hook if half else _no_op_hook)
        elif half:
            wrapped.register_comm_hook(None, _bf16_hook)
        return wrapped


def _bf16_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Call DDP's bf16 hook. DDP refuses the original on CPUs by its name, although it works."""
    future: torch.futures.Future[Tensor] = bf16_compress_hook(group, bucket)
    return future


def _no_op_hook(_state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Complete at once; DDP cannot use the result of a fake group's all-reduce."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _bf16_no_op_hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    bucket.buffer().copy_(bucket.buffer().to(torch.bfloat16))
    return _no_op_hook(state, bucket)


NO_COMMUNICATION = "no communication"
"""The name of the step without communication."""
DDP, FSDP2, DEEPSPEED = "ddp", "fsdp2", "deepspeed"
NO_PEERS = "none"


@dataclass(frozen=True, slots=True)
class BenchSetup:
    """What all step runners share."""

    config: RunConfig
    transport: Transport
    model: nn.Module
    """The initial model; every step runner copies it."""
    batch: tuple[Tensor, Tensor]
    device: str = "cpu"

    def compute_loss(self, model: nn.Module) -> Tensor:
        """Return the mean loss of ``model`` on the batch, in the run's precision."""
        inputs, targets = self.batch
        half = HALF_DTYPES.get(self.config.train.precision)
        with torch.autocast(inputs.device.type, half, enabled=half is not None):
            outputs = model(inputs)
        return per_sample_loss(outputs, targets).mean()

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the run's optimizer for ``model``."""
        return make_optimizer(self.config.optim, model)(model.parameters())


class PyTorchStep:
    """An ordinary PyTorch step; a peer communicates inside forward and backward."""

    def __init__(self, setup: BenchSetup, model: nn.Module) -> None:
        self._setup, self._model = setup, model
        self._optimizer = setup.build_optimizer(model)

    def __call__(self) -> None:
        """Take a step."""
        self._setup.compute_loss(self._model).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def drain(self) -> None:
        """Do nothing: no message is in flight after the optimizer step."""

    def close(self) -> None:
        """Do nothing: there are no threads."""


class StrettoStep:
    """The same step with a strategy, driven as the training loop does."""

    def __init__(
        self,
        setup: BenchSetup,
        strategy: AnyStrategyConfig | None = None,
        *,
        barrier: bool = False,
    ) -> None:
        self._setup = setup
        model = copy.deepcopy(setup.model)
        with torch.no_grad():
            calls = called_modules(model, lambda: setup.compute_loss(model))
        config = strategy or setup.config.strategy
        self._strategy = build_strategy(config, setup.transport, calls=calls)
        self._strategy.reads_gradients = barrier
        factory = make_optimizer(setup.config.optim, model)
        self._model, self._optimizer = self._strategy.attach(model, factory)
        self._step = 0

    @property
    def plan(self) -> Plan:
        """The plan of a sharded strategy, with a barrier if the strategy reads gradients."""
        assert isinstance(self._strategy, Sharded)
        plan = self._strategy.plan
        return add_barrier(plan) if self._strategy.reads_gradients else plan

    def __call__(self) -> None:
        """Take a step."""
        lr = self._setup.config.optim.lr or 0.0
        self._strategy.begin(self._step, 0, True, lr)
        (self._setup.compute_loss(self._model) / self._setup.transport.size).backward()
        outcome = self._strategy.after_backward()
        if not outcome.is_applied:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self._strategy.after_update()
        self._step += 1

    def drain(self) -> None:
        """Wait for the messages that the last step left in flight."""
        self._strategy.consolidate()

    def close(self) -> None:
        """End the strategy's threads."""
        self._strategy.close()


def parse_peers(names: str, config: RunConfig) -> tuple[str, ...]:
    """Return the peers in ``names`` such as "ddp,fsdp2"; by default those like the strategy.

    With "none" only the step without communication is compared.

    Raises:
        ConfigError: There is no such peer, or it is not supported.
    """
    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    if chosen == (NO_PEERS,):
        return ()
    for name in chosen:
        if name == DEEPSPEED:
            raise ConfigError(f"--peers {name}: {_deepspeed_notice()}")
        if name not in (DDP, FSDP2):
            raise ConfigError(
                f"no peer {name!r}{suggest_known_name(name, [DDP, FSDP2, NO_PEERS], 'known')}"
            )
    return chosen or ((DDP, FSDP2) if isinstance(config.strategy, ShardedConfig) else (DDP,))


def missing_peer_notices(config: RunConfig) -> list[str]:
    """Return a line for each peer that users may expect and that is not timed."""
    return [_deepspeed_notice()] if isinstance(config.strategy, ShardedConfig) else []


def _deepspeed_notice() -> str:
    if find_spec(DEEPSPEED) is None:
        return "DeepSpeed is not installed: it is not among the peers"
    return "DeepSpeed is installed, but this program cannot drive it: it is not among the peers"


def step_builders(
    setup: BenchSetup, peers: PeerProcessGroup, peer_names: tuple[str, ...]
) -> dict[str, Callable[[], StepRunner]]:
    """Return the builders of all step runners by name; Stretto's has the kind of its strategy."""
    builders: dict[str, Callable[[], StepRunner]] = {
        NO_COMMUNICATION: lambda: PyTorchStep(setup, model_without_communication(setup)),
        setup.config.strategy.kind: lambda: StrettoStep(setup),
    }
    if DDP in peer_names:
        builders |= _ddp_builders(setup, peers)
    if FSDP2 in peer_names:
        builders |= _fsdp2_builders(setup)
    return builders


def model_without_communication(setup: BenchSetup) -> nn.Module:
    """Return a copy of the model with the parameter type that Stretto computes in."""
    strategy, model = setup.config.strategy, copy.deepcopy(setup.model)
    half = WIRE_DTYPES[strategy.parameters] if isinstance(strategy, ShardedConfig) else None
    return model if half is None else model.to(half)


def _ddp_builders(
    setup: BenchSetup, peers: PeerProcessGroup
) -> Mapping[str, Callable[[], StepRunner]]:
    strategy = setup.config.strategy
    half = isinstance(strategy, ShardedConfig) and strategy.wire == "bf16"

    def factory(cap: int) -> Callable[[], StepRunner]:
        return lambda: PyTorchStep(setup, peers.ddp(copy.deepcopy(setup.model), cap, half=half))

    return {f"{DDP} {cap} MB{' bf16' * half}": factory(cap) for cap in BUCKET_CAPS_MB}


def _fsdp2_builders(setup: BenchSetup) -> Mapping[str, Callable[[], StepRunner]]:
    from stretto.bench.fsdp2 import FsdpSettings, apply_fully_shard  # takes seconds

    strategy = setup.config.strategy
    sharded_config = strategy if isinstance(strategy, ShardedConfig) else ShardedConfig()
    parameters = "bf16" in (setup.config.train.precision, sharded_config.parameters)
    gradients = parameters or sharded_config.wire == "bf16"

    def factory(reshard: bool) -> Callable[[], StepRunner]:
        settings = FsdpSettings(reshard, parameters, gradients, setup.device)

        def make() -> StepRunner:
            model = copy.deepcopy(setup.model)
            return PyTorchStep(
                setup,
                apply_fully_shard(model, fsdp2_groups(model, unit_bytes(sharded_config)), settings),
            )

        return make

    names = {"resharding": True, "keeping": False}
    tail = " bf16" * gradients
    return {f"{FSDP2} {name}{tail}": factory(reshard) for name, reshard in names.items()}


def fsdp2_groups(model: nn.Module, least_bytes: int) -> list[list[nn.Module]]:
    """Return one group for each block of ``model``; groups below ``least_bytes`` are joined.

    Modules that are used several times, and embeddings that are read and not called, are in no
    group. FSDP2 keeps them with the root module.
    """
    from stretto.bench.fsdp2 import group_modules  # takes seconds

    modules = [
        module
        for unit in find_units(model)
        if not unit.used_often
        for module in unit.modules
        if not isinstance(module, nn.Embedding) and module is not model
    ]
    return group_modules(modules, least_bytes)
