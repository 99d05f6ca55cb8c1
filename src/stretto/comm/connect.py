"""Connects a rank to all ranks of its world, over Gloo or NCCL."""

import torch
from torch._C._distributed_c10d import PrefixStore

from stretto.cluster.environment import disable_torch_nccl_watchdog
from stretto.cluster.interfaces import check_interface, interface_for_host
from stretto.cluster.rendezvous import rendezvous
from stretto.cluster.world import World
from stretto.comm.gloo import open_gloo
from stretto.comm.in_process_transports import thread_transports
from stretto.comm.nccl import open_nccl
from stretto.comm.transport import Transport
from stretto.errors import ConfigError


def connect(
    world: World, timeout_s: float = 300.0, *, name: str = "train", device: str = "cpu"
) -> Transport:
    """Return this rank's transport to all others; a world of one rank needs no network.

    Args:
        world: The ranks, and the address of the store through which they find each other.
        timeout_s: Seconds that a peer may be silent before it counts as lost.
        name: Name of the group. Messages of differently named groups never mix.
        device: "cpu" for Gloo only; with "cuda", tensors on this rank's GPU travel over NCCL.

    Raises:
        ConfigError: The interface that ``world`` names is missing or has no address, or
            ``device`` is "cuda" and there is no usable GPU.
    """
    if world.store_address is None:
        return thread_transports(1)[0]
    if world.interface:
        check_interface(world.interface)
    joined = rendezvous(world, timeout_s)
    assert joined.world.store_address is not None
    store = PrefixStore(name, joined.store)
    gloo = open_gloo(
        store,
        rank=world.rank,
        members=joined.world.mesh,
        generation=world.generation,
        interface=world.interface or interface_for_host(joined.world.store_address.host),
        timeout_s=timeout_s,
    )
    if device == "cpu":
        return gloo
    if not torch.cuda.is_available():
        raise ConfigError("device cuda: there is no GPU here, or this PyTorch has no CUDA")
    disable_torch_nccl_watchdog()
    gpu = torch.device("cuda", joined.world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(gpu)
    return open_nccl(PrefixStore(f"nccl/{world.generation}", store), gloo, gpu, timeout_s)
