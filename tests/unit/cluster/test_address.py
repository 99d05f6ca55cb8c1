"""From a name to an address, with a resolver and a Slurm that the test plays."""

import socket
import subprocess

import pytest

from stretto.cluster import address
from stretto.cluster.address import with_address
from stretto.cluster.world import Meeting, Mesh, World
from stretto.errors import LaunchError


def world(host, *, hosts=2, launcher="slurm"):
    return World(0, Mesh((1,) * hosts), Meeting(host, 15000), launcher=launcher)


@pytest.fixture
def resolver(monkeypatch):
    """Names and their addresses; any other is unknown."""
    known = {"n1": "198.18.0.1", "own": "127.0.1.1"}

    def look_up(host, *_rest, **_named):
        if host in known or host[0].isdigit():
            return [(socket.AF_INET, None, None, "", (known.get(host, host), 0))]
        raise socket.gaierror("unknown")

    monkeypatch.setattr(address.socket, "getaddrinfo", look_up)


@pytest.fixture
def slurm_says(monkeypatch):
    def say(node_addr):
        def run(command, **_named):
            told = f"NodeName={command[-1]} NodeAddr={node_addr} State=IDLE"
            return subprocess.CompletedProcess(command, 0, stdout=told)

        monkeypatch.setattr(address.subprocess, "run", run)

    return say


def test_a_name_that_resolves_is_left_as_it_is(resolver):
    assert with_address(world("n1")).meeting.host == "n1"


def test_a_name_that_only_slurm_knows_is_asked_of_slurm(resolver, slurm_says):
    slurm_says("198.18.0.7")
    assert with_address(world("n9")).meeting.host == "198.18.0.7"


def test_a_name_that_each_host_takes_for_itself_is_asked_of_slurm(resolver, slurm_says):
    slurm_says("198.18.0.7")
    assert with_address(world("own")).meeting.host == "198.18.0.7"


def test_on_one_host_its_own_name_will_do(resolver):
    assert with_address(world("own", hosts=1)).meeting.host == "own"


def test_a_loopback_address_given_as_such_is_meant(resolver):
    assert with_address(world("127.0.0.1", launcher="torchrun")).meeting.host == "127.0.0.1"


@pytest.mark.parametrize(("host", "why"), [("n9", "not known"), ("own", "leads to this very host")])
def test_where_nobody_knows_better_a_person_is_asked(resolver, host, why):
    with pytest.raises(LaunchError, match=rf"{why}.*MASTER_ADDR"):
        with_address(world(host, launcher="torchrun"))
