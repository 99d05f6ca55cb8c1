"""The store host is resolved to an address, with a fake resolver and a fake Slurm."""

import socket
import subprocess

import pytest

from stretto.cluster import interfaces as address
from stretto.cluster.interfaces import resolve_store_host
from stretto.cluster.world import Mesh, StoreAddress, World
from stretto.errors import LaunchError


def world(host, *, hosts=2, launcher="slurm"):
    return World(0, Mesh((1,) * hosts), StoreAddress(host, 15000), launcher=launcher)


@pytest.fixture
def resolver(monkeypatch):
    """Let a few names have addresses; any other name is unknown."""
    addresses = {"n1": "198.18.0.1", "own": "127.0.1.1"}

    def look_up(host, *_rest, **_named):
        if host in addresses or host[0].isdigit():
            return [(socket.AF_INET, None, None, "", (addresses.get(host, host), 0))]
        raise socket.gaierror("unknown")

    monkeypatch.setattr(address.socket, "getaddrinfo", look_up)


@pytest.fixture
def set_slurm_answer(monkeypatch):
    def set_answer(node_addr):
        def run(command, **_named):
            answer = f"NodeName={command[-1]} NodeAddr={node_addr} State=IDLE"
            return subprocess.CompletedProcess(command, 0, stdout=answer)

        monkeypatch.setattr(address.subprocess, "run", run)

    return set_answer


def test_a_name_that_resolves_is_kept(resolver):
    assert resolve_store_host(world("n1")).store_address.host == "n1"


def test_a_name_that_only_slurm_knows_is_asked_of_slurm(resolver, set_slurm_answer):
    set_slurm_answer("198.18.0.7")
    assert resolve_store_host(world("n9")).store_address.host == "198.18.0.7"


def test_a_name_that_resolves_to_loopback_is_asked_of_slurm(resolver, set_slurm_answer):
    set_slurm_answer("198.18.0.7")
    assert resolve_store_host(world("own")).store_address.host == "198.18.0.7"


def test_on_one_host_a_name_on_loopback_is_kept(resolver):
    assert resolve_store_host(world("own", hosts=1)).store_address.host == "own"


def test_a_loopback_address_given_as_a_number_is_kept(resolver):
    assert (
        resolve_store_host(world("127.0.0.1", launcher="torchrun")).store_address.host
        == "127.0.0.1"
    )


@pytest.mark.parametrize(("host", "why"), [("n9", "not known"), ("own", "loopback address")])
def test_without_an_address_the_user_is_asked_for_one(resolver, host, why):
    with pytest.raises(LaunchError, match=rf"{why}.*MASTER_ADDR"):
        resolve_store_host(world(host, launcher="torchrun"))
