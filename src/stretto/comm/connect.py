"""From a `World` to a `Channel` that reaches all of it."""

from torch._C._distributed_c10d import PrefixStore

from stretto.cluster.interface import check_interface, interface_towards
from stretto.cluster.meet import meet
from stretto.cluster.world import World
from stretto.comm.channel import Channel
from stretto.comm.local import local_channels
from stretto.comm.torch_channel import open_channel


def connect(world: World, timeout_s: float = 300.0, *, name: str = "train") -> Channel:
    """Return this rank's channel to all others; a world of one needs no network.

    Channels of different names are different groups: their messages never meet.

    Raises:
        ConfigError: The interface that ``world`` names is not there or has no address.
    """
    if world.meeting is None:
        return local_channels(1)[0]
    if world.interface:
        check_interface(world.interface)
    met = meet(world, timeout_s)
    assert met.world.meeting is not None
    return open_channel(
        PrefixStore(name, met.store),
        rank=world.rank,
        members=range(world.size),
        generation=world.generation,
        interface=world.interface or interface_towards(met.world.meeting.host),
        timeout_s=timeout_s,
    )
