"""The peer to beat: PyTorch's DistributedDataParallel, at its best setting."""

from itertools import count
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, HashStore, PrefixStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from stretto.cluster.meet import meet
from stretto.cluster.world import World

BUCKET_CAPS_MB = (1, 2, 4, 8, 25)
"""The sizes among which its best is looked for; 25 is its default."""
_GROUPS = count()
"""All ranks make the same groups in the same order."""


class Peers:
    """The default process group, which borrowed engines need and nothing else here uses."""

    def __init__(self, world: World, device: str = "cpu", *, idle: bool = False) -> None:
        """Meet the others; or, ``idle``, make a group of the same size that carries nothing."""
        self._idle = idle
        if idle:
            import torch.testing._internal.distributed.fake_pg  # noqa: F401 - it makes it known
        # A group finds its members by keys of its own: an earlier one's are still in the store.
        name = f"peers/{next(_GROUPS)}"
        store = HashStore() if idle else PrefixStore(name, meet(world).store)
        back_end = "fake" if idle else "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(back_end, store=store, rank=world.rank, world_size=world.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        dist.destroy_process_group()

    def ddp(self, model: nn.Module, bucket_cap_mb: int, *, half: bool = False) -> nn.Module:
        """Return ``model`` in DDP, gradients as views of its buckets, which may travel as bf16."""
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True
        )
        if self._idle:
            wrapped.register_comm_hook(None, _send_half_nowhere if half else _send_nowhere)
        elif half:
            wrapped.register_comm_hook(None, _send_half)
        return wrapped


def _send_half(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Let DDP's own hook send; under its own name it is refused on CPUs, where it works, too."""
    sent: torch.futures.Future[Tensor] = bf16_compress_hook(group, bucket)
    return sent


def _send_nowhere(_state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Be done at once: what an idle group returns is nothing that DDP can take."""
    sent: torch.futures.Future[Tensor] = torch.futures.Future()
    sent.set_result(bucket.buffer())
    return sent


def _send_half_nowhere(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    bucket.buffer().copy_(bucket.buffer().to(torch.bfloat16))
    return _send_nowhere(state, bucket)
