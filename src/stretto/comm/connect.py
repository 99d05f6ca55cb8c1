"""From a `World` to a `Channel` that reaches all of it."""

import torch
from torch._C._distributed_c10d import PrefixStore

from stretto.cluster.interface import check_interface, interface_towards
from stretto.cluster.meet import meet
from stretto.cluster.watchdog import quiet_watchdog
from stretto.cluster.world import World
from stretto.comm.channel import Channel
from stretto.comm.gloo import open_channel
from stretto.comm.local import local_channels
from stretto.comm.nccl import open_nccl
from stretto.errors import ConfigError


def connect(
    world: World, timeout_s: float = 300.0, *, name: str = "train", device: str = "cpu"
) -> Channel:
    """Return this rank's channel to all others; a world of one needs no network.

    Channels of different names are different groups: their messages never meet. With device
    "cuda", tensors of this rank's GPU travel over NCCL.

    Raises:
        ConfigError: The interface that ``world`` names is not there or has no address.
    """
    if world.meeting is None:
        return local_channels(1)[0]
    if world.interface:
        check_interface(world.interface)
    met = meet(world, timeout_s)
    assert met.world.meeting is not None
    store = PrefixStore(name, met.store)
    gloo = open_channel(
        store,
        rank=world.rank,
        members=met.world.mesh,
        generation=world.generation,
        interface=world.interface or interface_towards(met.world.meeting.host),
        timeout_s=timeout_s,
    )
    if device == "cpu":
        return gloo
    if not torch.cuda.is_available():
        raise ConfigError("device cuda: there is no GPU here, or this PyTorch has no CUDA")
    quiet_watchdog()
    gpu = torch.device("cuda", met.world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(gpu)
    return open_nccl(PrefixStore(f"nccl/{world.generation}", store), gloo, gpu, timeout_s)
