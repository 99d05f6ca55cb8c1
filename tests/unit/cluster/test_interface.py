import socket
from types import SimpleNamespace

import psutil
import pytest

from stretto.cluster.interfaces import check_interface
from stretto.cluster.world import Mesh, StoreAddress, World
from stretto.comm.connect import connect
from stretto.errors import ConfigError


def entries_of(*families):
    return [SimpleNamespace(family=family, address="made up") for family in families]


@pytest.fixture
def made_up_host(monkeypatch):
    """Fake interfaces: loopback with IPv4, a card with IPv6, and a bridge without an address."""
    interfaces = {
        "lo": entries_of(socket.AF_INET, socket.AF_PACKET),
        "eth0": entries_of(socket.AF_PACKET, socket.AF_INET6),
        "br0": entries_of(socket.AF_PACKET),
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)


@pytest.mark.usefixtures("made_up_host")
@pytest.mark.parametrize("name", ["lo", "eth0"])
def test_an_interface_with_an_ipv4_or_ipv6_address_is_accepted(name):
    check_interface(name)


@pytest.mark.usefixtures("made_up_host")
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("nope0", "no such interface"), ("br0", "it has no address"), ("no\x1bpe", "no such")],
)
def test_an_unusable_interface_is_refused_with_the_usable_ones(name, wrong):
    with pytest.raises(ConfigError) as caught:
        check_interface(name)
    message = str(caught.value)
    shown = name.replace("\x1b", "")
    assert message.startswith(
        f"the interface {shown} (STRETTO_INTERFACE or GLOO_SOCKET_IFNAME): {wrong}"
    )
    assert message.endswith(" on this host; there are lo, eth0")


def test_a_missing_interface_is_refused_before_connecting():
    store_address = StoreAddress("no-such-host.invalid", 1)
    with pytest.raises(ConfigError, match=r"the interface nope0 .*: no such interface"):
        connect(World(0, Mesh((2,)), store_address, interface="nope0"))
