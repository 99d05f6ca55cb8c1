"""Facts that a rank collects about its machine, and the time limit of the examination."""

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from pydantic import TypeAdapter

import stretto
from stretto.cluster.store import serve_store
from stretto.cluster.world import Mesh, StoreAddress, World
from stretto.config import load
from stretto.doctor import exchange_facts as attend
from stretto.doctor import gather_facts
from stretto.doctor import local_facts as facts
from stretto.doctor import local_facts as network
from stretto.doctor.checks import run_checks
from stretto.doctor.gather_facts import (
    CHECKPOINTS_ON_DISK,
    DEFAULT_REQUIRED_BYTES,
    checkpoint_bytes,
    requirements_of,
)
from stretto.doctor.local_facts import inspect_folder, inspect_network
from stretto.doctor.records import Facts
from stretto.errors import LaunchError
from stretto.models import build_model
from stretto.run import RunConfig
from tests.unit.doctor.examples import PURPOSE

ALONE = World(0, Mesh((1,)))


@pytest.fixture
def requirements(tmp_path):
    return replace(PURPOSE, folder=str(tmp_path))


@pytest.fixture
def store():
    return serve_store()


def rank_of_two(rank, port):
    return World(rank, Mesh((2,)), store_address=StoreAddress("127.0.0.1", port))


def no_port():
    """Return a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def test_facts_survive_the_way_over_the_store(requirements):
    seen = facts.collect_facts(ALONE, "because", requirements, on_activity=lambda _doing: None)
    adapter = TypeAdapter(Facts)
    assert adapter.validate_json(adapter.dump_json(seen)) == seen


def test_the_code_is_every_source_file_of_the_package_that_runs():
    digests = facts.inspect_code().files
    root = Path(stretto.__file__).parent
    assert set(digests) == {path.relative_to(root).as_posix() for path in root.rglob("*.py")}
    assert "cli/main.py" in digests


def test_a_changed_file_has_another_digest(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").write_text("a = 1\n")
    monkeypatch.setattr(stretto, "__file__", str(tmp_path / "__init__.py"))
    before = facts.inspect_code()
    (tmp_path / "__init__.py").write_text("a = 2\n")
    assert facts.inspect_code().files != before.files


def test_the_machine_is_the_one_we_run_on(requirements):
    machine = facts.inspect_machine(replace(ALONE, threads=3), requirements)
    assert set(machine.cores) == os.sched_getaffinity(0)
    assert machine.memory_bytes == psutil.virtual_memory().total
    assert machine.threads == 3
    assert facts.inspect_machine(ALONE, replace(requirements, threads=5)).threads == 5


def test_a_folder_is_left_as_it_was(tmp_path):
    assert inspect_folder(tmp_path).error == ""
    assert list(tmp_path.iterdir()) == []


def test_for_a_folder_that_is_not_there_yet_its_parent_is_tried_and_nothing_made(tmp_path):
    seen = inspect_folder(tmp_path / "runs" / "new")
    assert (seen.error, seen.free_bytes > 0) == ("", True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    assert inspect_folder(tmp_path / "file" / "run").error == "Not a directory"


def test_the_kernel_s_way_is_taken_unless_an_interface_is_named():
    seen = inspect_network(rank_of_two(0, 1))
    assert (seen.requested_interface, seen.route_interface, seen.address) == ("", "lo", "127.0.0.1")


def test_an_interface_that_does_not_exist_leaves_the_way_to_the_store():
    seen = inspect_network(replace(rank_of_two(0, 1), interface="ib7"))
    assert "ib7" not in seen.interface_names
    assert seen.address == "127.0.0.1"


def test_a_port_in_use_is_counted(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        monkeypatch.setattr(network, "ephemeral_range", lambda: (port, port))
        assert inspect_network(ALONE).ports_used == 1
    assert inspect_network(ALONE).ports_used == 0


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_room_for_a_checkpoint_is_what_its_tensors_take(optimizer):
    config = load(RunConfig, None, [f"optim.kind={optimizer}", "data.samples=64"]).config
    copies = {"sgd": 2, "adamw": 3}[optimizer]
    model = build_model(config.model, seed=0)
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert copies * weights <= checkpoint_bytes(config) <= copies * weights + 1000


def test_without_a_run_file_a_gigabyte_is_asked_for():
    config = RunConfig()
    assert requirements_of(config, model_is_known=False).required_bytes == DEFAULT_REQUIRED_BYTES
    interface_names = requirements_of(config, model_is_known=True)
    assert interface_names.required_bytes == CHECKPOINTS_ON_DISK * checkpoint_bytes(config)


def test_a_rank_alone_examines_itself(requirements):
    seen = gather_facts.gather_facts(ALONE, "because", requirements, patience_s=5)
    assert (seen.present_ranks, set(seen.facts), set(seen.probe_reports)) == ((0,), {0}, {0})


def test_a_rank_that_cannot_reach_the_store_says_where_it_tried_and_what_to_do(requirements):
    port = no_port()
    with pytest.raises(LaunchError, match=rf"127\.0\.0\.1:{port} over lo .* refused; .* open TCP"):
        gather_facts.gather_facts(rank_of_two(1, port), "because", requirements, patience_s=0.2)


def test_rank_0_reports_an_unreachable_store_as_a_finding_with_its_own_facts(requirements):
    seen = gather_facts.gather_facts(
        rank_of_two(0, no_port()), "because", requirements, patience_s=0.2
    )
    failed = [found.check for found in run_checks(seen) if found.status == "FAIL"]
    assert failed == ["rendezvous"]


def test_a_store_that_accepts_and_never_answers_does_not_hold_us(requirements, monkeypatch):
    monkeypatch.setattr(gather_facts, "AFTER_RENDEZVOUS_S", 0.5)
    began_s = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        world = rank_of_two(1, deaf.getsockname()[1])
        with pytest.raises(LaunchError, match="rank 1 is stuck while joining the store"):
            gather_facts.gather_facts(world, "because", requirements, patience_s=1.0)
    assert time.monotonic() - began_s < 10


def test_a_second_process_of_the_same_rank_is_refused_and_told(requirements, store):
    world = rank_of_two(1, store.port)
    own = facts.collect_facts(world, "because", requirements, on_activity=lambda _doing: None)
    doctor_store = attend.open_doctor_store(world, own, time.monotonic() + 5)
    assert doctor_store.add("claim/1") == 1
    with pytest.raises(LaunchError, match="rank 1 is there twice"):
        gather_facts.gather_facts(world, "because", requirements, patience_s=0.5)
    assert f"process {os.getpid()}" in doctor_store.read("double/1")


def test_a_defect_of_ours_is_not_taken_for_one_of_the_machine(requirements, monkeypatch):
    def fail(*_arguments, **_named):
        raise ZeroDivisionError

    monkeypatch.setattr(gather_facts, "collect_facts", fail)
    with pytest.raises(ZeroDivisionError):
        gather_facts.gather_facts(ALONE, "because", requirements, patience_s=5)
