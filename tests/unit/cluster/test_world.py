import pytest

from stretto.cluster.detect import detect, fair_threads
from stretto.cluster.interface import interface_towards
from stretto.cluster.world import Mesh
from stretto.errors import LaunchError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "198.18.0.9",
    "MASTER_PORT": "29500",
}


def test_without_a_launcher_one_process_is_the_whole_world():
    world = detect({})
    assert (world.rank, world.size, world.meeting) == (0, 1, None)


def test_torchruns_words_are_understood():
    world = detect(TORCHRUN)
    assert (world.rank, world.size, world.host, world.local_rank) == (5, 8, 1, 1)
    assert world.mesh == Mesh((4, 4))
    assert world.meeting.held_by_rank_0


def test_a_store_held_by_the_launcher_is_only_joined():
    world = detect({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert not world.meeting.held_by_rank_0


def test_each_restart_is_a_new_generation():
    assert detect({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3"}).generation == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "8"}, "RANK=8 does not fit WORLD_SIZE=8"),
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
        ({"LOCAL_WORLD_SIZE": "3"}, "not a multiple of LOCAL_WORLD_SIZE=3"),
        ({"MASTER_PORT": None}, "not MASTER_PORT"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
    ],
)
def test_contradictions_are_named(change, words):
    environ = {k: v for k, v in {**TORCHRUN, **change}.items() if v is not None}
    with pytest.raises(LaunchError, match=words):
        detect(environ)


def test_threads_are_what_was_asked_for_or_a_fair_share():
    assert fair_threads(1, {"OMP_NUM_THREADS": "7"}) == 7
    assert fair_threads(10_000, {}) == 1
    assert fair_threads(1, {"OMP_NUM_THREADS": "none"}) >= 1


def test_the_interface_towards_an_address_is_asked_of_the_kernel():
    assert interface_towards("127.0.0.1") == "lo"


def test_an_address_nobody_can_resolve_is_named():
    with pytest.raises(LaunchError, match=r"no route to no-such-host\.invalid"):
        interface_towards("no-such-host.invalid")


def test_a_mesh_of_uneven_hosts_knows_where_its_ranks_live():
    mesh = Mesh((2, 1, 3))
    assert [mesh.host_of(rank) for rank in range(mesh.size)] == [0, 0, 1, 2, 2, 2]
    assert list(mesh.on_host(2)) == [3, 4, 5]
