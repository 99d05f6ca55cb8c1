import socket
from types import SimpleNamespace

import psutil
import pytest

from stretto.cluster.interface import check_interface
from stretto.cluster.world import Meeting, Mesh, World
from stretto.comm.connect import connect
from stretto.errors import ConfigError


def having(*families):
    return [SimpleNamespace(family=family, address="made up") for family in families]


@pytest.fixture
def made_up_host(monkeypatch):
    """A host with loopback, a card of either kind of address, and a bridge without any."""
    interfaces = {
        "lo": having(socket.AF_INET, socket.AF_PACKET),
        "eth0": having(socket.AF_PACKET, socket.AF_INET6),
        "br0": having(socket.AF_PACKET),
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)


@pytest.mark.usefixtures("made_up_host")
@pytest.mark.parametrize("name", ["lo", "eth0"])
def test_an_interface_with_an_address_of_either_kind_is_of_use(name):
    check_interface(name)


@pytest.mark.usefixtures("made_up_host")
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("nope0", "no such interface"), ("br0", "it has no address"), ("no\x1bpe", "no such")],
)
def test_a_named_interface_that_cannot_be_used_is_told_with_those_that_can(name, wrong):
    with pytest.raises(ConfigError) as caught:
        check_interface(name)
    told = str(caught.value)
    shown = name.replace("\x1b", "")
    assert told.startswith(
        f"the interface {shown} (STRETTO_INTERFACE or GLOO_SOCKET_IFNAME): {wrong}"
    )
    assert told.endswith(" on this host; there are lo, eth0")


def test_connecting_over_an_interface_that_is_not_there_is_refused_before_anybody_is_met():
    nobody = Meeting("no-such-host.invalid", 1)
    with pytest.raises(ConfigError, match=r"the interface nope0 .*: no such interface"):
        connect(World(0, Mesh((2,)), nobody, interface="nope0"))
