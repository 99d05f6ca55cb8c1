import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.cluster.detect import (
    describe_detection,
    detect_world,
    first_node,
    parse_tasks_per_node,
)
from stretto.cluster.environment import threads_per_rank
from stretto.cluster.interfaces import interface_for_host
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
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "n2",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "2951217152.0;tcp://198.18.0.7:38745",
    "PMIX_NAMESPACE": "2951217153",
}


def changed(environ, change):
    return {k: v for k, v in {**environ, **change}.items() if v is not None}


def test_without_a_launcher_the_world_has_one_rank():
    world = detect_world({})
    assert (world.rank, world.size, world.store_address) == (0, 1, None)


def test_torchrun_variables_are_read():
    world = detect_world(TORCHRUN)
    assert (world.rank, world.size, world.host, world.local_rank) == (5, 8, 1, 1)
    assert world.mesh == Mesh((4, 4))
    assert world.store_address.started_by_rank_0


def test_a_store_that_the_launcher_serves_is_not_started_by_rank_0():
    world = detect_world({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert not world.store_address.started_by_rank_0


def test_each_restart_is_a_new_generation():
    assert detect_world({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3"}).generation == 3
    assert detect_world({**SLURM, "SLURM_RESTART_COUNT": "2"}).generation == 2


def test_slurm_variables_are_read():
    world = detect_world(SLURM)
    assert (world.rank, world.mesh, world.host, world.local_rank) == (2, Mesh((2, 1)), 1, 0)
    assert (world.store_address.host, world.store_address.started_by_rank_0) == ("n1", True)


@pytest.mark.parametrize("batch_variable", [{"ENVIRONMENT": "BATCH"}, {"SLURM_GET_USER_ENV": "1"}])
def test_a_step_of_a_batch_job_can_ask_to_be_queued_again(batch_variable):
    assert detect_world({**SLURM, **batch_variable}).restart_command == (
        "scontrol",
        "requeue",
        "77",
    )


@pytest.mark.parametrize("other", [{}, {"ENVIRONMENT": "production"}])
def test_a_job_without_a_batch_script_cannot_be_queued_again(other):
    assert detect_world({**SLURM, **other}).restart_command == ()


def test_all_tasks_of_a_step_have_the_same_store_address():
    first = changed(SLURM, {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"})
    assert detect_world(first).store_address == detect_world(SLURM).store_address


def test_another_step_and_a_restart_of_the_job_have_other_store_addresses():
    changes = [{}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "78"}]
    addresses = {detect_world({**SLURM, **change}).store_address for change in changes}
    assert len(addresses) == len(changes)


def test_master_addr_and_port_override_the_store_address():
    named = {"MASTER_ADDR": "198.18.0.3", "MASTER_PORT": "4242"}
    for environ in (SLURM, OPENMPI):
        store_address = detect_world({**environ, **named}).store_address
        assert (store_address.host, store_address.port) == ("198.18.0.3", 4242)


def test_a_step_of_one_task_is_a_world_of_one_rank():
    one = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    world = detect_world(changed({**SLURM, **one}, {"SLURM_NODEID": "0"}))
    assert (world.size, world.store_address) == (1, None)


def test_a_batch_script_is_not_a_rank():
    script = changed(SLURM, {"SLURM_STEP_ID": None})
    assert detect_world(script).launcher == "none"


def test_threads_of_a_task_are_the_cpus_it_was_given():
    assert detect_world({**SLURM, "SLURM_CPUS_PER_TASK": "6"}).threads == 6


def test_open_mpi_variables_are_read():
    world = detect_world(OPENMPI)
    assert (world.rank, world.mesh, world.local_rank) == (3, Mesh((2, 2)), 1)
    assert (world.store_address.host, world.store_address.started_by_rank_0) == ("198.18.0.7", True)


def test_ranks_of_one_host_use_a_store_on_loopback():
    assert (
        detect_world({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).store_address.host
        == "127.0.0.1"
    )


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({**SLURM, **OPENMPI, **TORCHRUN}, "torchrun"),
        ({**SLURM, **OPENMPI}, "openmpi"),
        (SLURM, "slurm"),
    ],
)
def test_the_innermost_of_nested_launchers_is_used(environ, launcher):
    assert detect_world(environ).launcher == launcher
    assert describe_detection(environ).startswith(f"{launcher}: ")


@pytest.mark.parametrize(
    ("environ", "change", "message"),
    [
        (TORCHRUN, {"RANK": "8"}, "RANK=8 does not fit WORLD_SIZE=8"),
        (TORCHRUN, {"RANK": "one"}, "RANK='one' is not a whole number"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 does not fit WORLD_SIZE=8"),
        (TORCHRUN, {"MASTER_PORT": None}, "not MASTER_PORT"),
        (TORCHRUN, {"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
        (TORCHRUN, {"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        (SLURM, {"SLURM_PROCID": "3"}, "SLURM_PROCID=3 does not fit SLURM_STEP_NUM_TASKS=3"),
        (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "2,2"}, "are 4 tasks, but SLURM_STEP_NUM_TASKS=3"),
        (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "two"}, "'two' is not a list of counts"),
        (OPENMPI, {"OMPI_COMM_WORLD_RANK": "4"}, "does not fit OMPI_COMM_WORLD_SIZE=4"),
        (OPENMPI, {"OMPI_MCA_orte_hnp_uri": None}, "mpirun -x MASTER_ADDR=HOST"),
        (OPENMPI, {"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "LOCAL_SIZE=5 does not fit"),
    ],
)
def test_contradictions_are_named(environ, change, message):
    with pytest.raises(LaunchError, match=message):
        detect_world(changed(environ, change))


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 9)), min_size=1))
def test_slurm_task_counts_are_parsed_as_slurm_writes_them(groups):
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else f"{tasks}" for tasks, nodes in groups)
    assert list(parse_tasks_per_node(text)) == [
        tasks for tasks, nodes in groups for _ in range(nodes)
    ]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("gpu[003-005,9],x", "gpu003"),
        ("a7,b[1-2]", "a7"),
        ("rack[2,4]n[03-04]-ib", "rack2n03-ib"),
    ],
)
def test_the_first_node_of_a_list_is_found(nodes, first):
    assert first_node(nodes) == first


def test_threads_are_omp_num_threads_or_a_share_of_the_cores():
    assert threads_per_rank(1, {"OMP_NUM_THREADS": "7"}) == 7
    assert threads_per_rank(10_000, {}) == 1
    assert threads_per_rank(1, {"OMP_NUM_THREADS": "none"}) >= 1


def test_the_interface_towards_an_address_comes_from_the_routing_table():
    assert interface_for_host("127.0.0.1") == "lo"


def test_an_address_that_does_not_resolve_is_named():
    with pytest.raises(LaunchError, match=r"no route to no-such-host\.invalid"):
        interface_for_host("no-such-host.invalid")


def test_a_mesh_of_uneven_hosts_finds_the_host_of_each_rank():
    mesh = Mesh((2, 1, 3))
    assert [mesh.host_of(rank) for rank in range(mesh.size)] == [0, 0, 1, 2, 2, 2]
    assert list(mesh.ranks_on_host(2)) == [3, 4, 5]
