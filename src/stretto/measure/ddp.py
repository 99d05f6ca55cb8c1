"""The peer to beat: PyTorch's DistributedDataParallel, at its best setting."""

from typing import Self

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from stretto.cluster.meet import meet
from stretto.cluster.world import World

BUCKET_CAPS_MB = (1, 2, 4, 8, 25)
"""The sizes among which its best is looked for; 25 is its default."""


class Peers:
    """The default process group, which borrowed engines need and nothing else here uses."""

    def __init__(self, world: World, device: str = "cpu") -> None:
        store = PrefixStore("peers", meet(world).store)
        back_end = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(back_end, store=store, rank=world.rank, world_size=world.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        dist.destroy_process_group()

    def ddp(self, model: nn.Module, bucket_cap_mb: int) -> nn.Module:
        """Return ``model`` in DDP, gradients as views of its buckets."""
        return DistributedDataParallel(
            model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True
        )
