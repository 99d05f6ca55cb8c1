"""What a rank sees of its own machine, and how long it takes at most to say so."""

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from pydantic import TypeAdapter

import stretto
from stretto.cluster.store import hold_store
from stretto.cluster.world import Meeting, Mesh, World
from stretto.config import load
from stretto.doctor import attend, examine, facts, network
from stretto.doctor.checks import judge
from stretto.doctor.folder import look_at_folder
from stretto.doctor.need import CHECKPOINTS, UNKNOWN_NEED_BYTES, checkpoint_bytes, purpose_of
from stretto.doctor.network import look_at_network
from stretto.doctor.records import Facts
from stretto.errors import LaunchError
from stretto.model import build_model
from stretto.run import RunConfig
from tests.unit.doctor.made_up import PURPOSE

ALONE = World(0, Mesh((1,)))


@pytest.fixture
def purpose(tmp_path):
    return replace(PURPOSE, folder=str(tmp_path))


@pytest.fixture
def store():
    return hold_store()


def rank_of_two(rank, port):
    return World(rank, Mesh((2,)), meeting=Meeting("127.0.0.1", port))


def no_port():
    """Return a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def test_facts_survive_the_way_over_the_store(purpose):
    seen = facts.gather(ALONE, "because", purpose, note=lambda _doing: None)
    adapter = TypeAdapter(Facts)
    assert adapter.validate_json(adapter.dump_json(seen)) == seen


def test_the_code_is_every_source_file_of_the_package_that_runs():
    digests = facts.look_at_code().files
    root = Path(stretto.__file__).parent
    assert set(digests) == {path.relative_to(root).as_posix() for path in root.rglob("*.py")}
    assert "cli/main.py" in digests


def test_a_changed_file_has_another_digest(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").write_text("a = 1\n")
    monkeypatch.setattr(stretto, "__file__", str(tmp_path / "__init__.py"))
    before = facts.look_at_code()
    (tmp_path / "__init__.py").write_text("a = 2\n")
    assert facts.look_at_code().files != before.files


def test_the_machine_is_the_one_we_run_on(purpose):
    machine = facts.look_at_machine(replace(ALONE, threads=3), purpose)
    assert set(machine.cores) == os.sched_getaffinity(0)
    assert machine.memory_bytes == psutil.virtual_memory().total
    assert machine.threads == 3
    assert facts.look_at_machine(ALONE, replace(purpose, threads=5)).threads == 5


def test_a_folder_is_left_as_it_was(tmp_path):
    assert look_at_folder(tmp_path).error == ""
    assert list(tmp_path.iterdir()) == []


def test_for_a_folder_that_is_not_there_yet_its_parent_is_tried_and_nothing_made(tmp_path):
    seen = look_at_folder(tmp_path / "runs" / "new")
    assert (seen.error, seen.free_bytes > 0) == ("", True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    assert look_at_folder(tmp_path / "file" / "run").error == "Not a directory"


def test_the_kernel_s_way_is_taken_unless_an_interface_is_named():
    seen = look_at_network(rank_of_two(0, 1))
    assert (seen.asked, seen.towards, seen.address) == ("", "lo", "127.0.0.1")


def test_an_interface_that_does_not_exist_leaves_the_way_to_the_store():
    seen = look_at_network(replace(rank_of_two(0, 1), interface="ib7"))
    assert "ib7" not in seen.known
    assert seen.address == "127.0.0.1"


def test_a_port_in_use_is_counted(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        monkeypatch.setattr(network, "_ephemeral_range", lambda: (port, port))
        assert look_at_network(ALONE).ports_used == 1
    assert look_at_network(ALONE).ports_used == 0


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_room_for_a_checkpoint_is_what_its_tensors_take(optimizer):
    config = load(RunConfig, None, [f"optim.kind={optimizer}", "data.samples=64"]).config
    copies = {"sgd": 2, "adamw": 3}[optimizer]
    model = build_model(config.model, seed=0)
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert copies * weights <= checkpoint_bytes(config) <= copies * weights + 1000


def test_without_a_run_file_a_gigabyte_is_asked_for():
    config = RunConfig()
    assert purpose_of(config, model_is_known=False).need_bytes == UNKNOWN_NEED_BYTES
    known = purpose_of(config, model_is_known=True)
    assert known.need_bytes == CHECKPOINTS * checkpoint_bytes(config)


def test_a_rank_alone_examines_itself(purpose):
    seen = examine.examine(ALONE, "because", purpose, patience_s=5)
    assert (seen.came, set(seen.facts), set(seen.rounds)) == ((0,), {0}, {0})


def test_a_rank_that_cannot_reach_the_store_says_where_it_tried_and_what_to_do(purpose):
    port = no_port()
    with pytest.raises(LaunchError, match=rf"127\.0\.0\.1:{port} over lo .* refused; .* open TCP"):
        examine.examine(rank_of_two(1, port), "because", purpose, patience_s=0.2)


def test_rank_0_tells_the_same_as_a_finding_beside_what_it_knows(purpose):
    seen = examine.examine(rank_of_two(0, no_port()), "because", purpose, patience_s=0.2)
    failed = [found.check for found in judge(seen) if found.status == "FAIL"]
    assert failed == ["roll call"]


def test_a_store_that_accepts_and_never_answers_does_not_hold_us(purpose, monkeypatch):
    monkeypatch.setattr(examine, "AFTER_ROLL_S", 0.5)
    began_s = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        world = rank_of_two(1, deaf.getsockname()[1])
        with pytest.raises(LaunchError, match="rank 1 is stuck while joining the store"):
            examine.examine(world, "because", purpose, patience_s=1.0)
    assert time.monotonic() - began_s < 10


def test_a_second_process_of_the_same_rank_is_refused_and_told(purpose, store):
    world = rank_of_two(1, store.port)
    own = facts.gather(world, "because", purpose, note=lambda _doing: None)
    board = attend.join(world, own, time.monotonic() + 5)
    assert board.count("claim/1") == 1
    with pytest.raises(LaunchError, match="rank 1 is there twice"):
        examine.examine(world, "because", purpose, patience_s=0.5)
    assert f"process {os.getpid()}" in board.read("double/1")


def test_a_defect_of_ours_is_not_taken_for_one_of_the_machine(purpose, monkeypatch):
    def fail(*_arguments, **_named):
        raise ZeroDivisionError

    monkeypatch.setattr(examine, "gather", fail)
    with pytest.raises(ZeroDivisionError):
        examine.examine(ALONE, "because", purpose, patience_s=5)
