"""A save that is killed at any moment leaves a complete checkpoint to resume from."""

import multiprocessing
import random
import shutil
from multiprocessing.context import ForkServerContext

import pytest

from stretto.checkpoint import load_newest, save_checkpoint, verify_checkpoint
from stretto.checkpoint.folders import step_folders
from tests.unit.checkpoint.saver import assert_same, redo_and_go_on, save_over_and_over, state_at


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stretto.checkpoint", "tests.unit.checkpoint.saver"])
    return context


@pytest.mark.multi
def test_a_kill_before_any_folder_event_leaves_only_complete_checkpoints(processes, tmp_path):
    steps_found = []
    for strike in range(200):
        folder = tmp_path / str(strike) / "checkpoints"
        for step in (1, 2):
            save_checkpoint(folder, state_at(step), generation=0)
        child = processes.Process(target=redo_and_go_on, args=(folder, strike))
        child.start()
        child.join()
        complaints = []
        found = load_newest(folder, log=complaints.append)
        assert complaints == []
        assert_same(found, state_at(found.step if found else -1))
        steps_found.append(found.step)
        for path in step_folders(folder):
            verify_checkpoint(path)
        if child.exitcode == 0:
            break
        shutil.rmtree(tmp_path / str(strike))
    assert child.exitcode == 0, "the save has more events than were struck"
    assert steps_found == sorted(steps_found)
    assert set(steps_found) == {2, 3}


@pytest.mark.multi
def test_a_kill_at_a_random_moment_leaves_a_complete_checkpoint_and_no_lasting_leftovers(
    processes, tmp_path
):
    folder, seed, step = tmp_path / "checkpoints", 20, 1
    chance = random.Random(seed)
    for _ in range(12):
        listening, telling = processes.Pipe(duplex=False)
        child = processes.Process(target=save_over_and_over, args=(folder, step, telling))
        child.start()
        committed = [listening.recv()]
        child.join(timeout=chance.uniform(0.0, 0.05))
        child.kill()
        child.join()
        while listening.poll():
            committed.append(listening.recv())
        complaints = []
        found = load_newest(folder, log=complaints.append)
        assert complaints == [], f"seed {seed}"
        assert found is not None, f"seed {seed}"
        assert found.step in (committed[-1], committed[-1] + 1), f"seed {seed}"
        assert_same(found, state_at(found.step, num_elements=200_000))
        step = found.step
    save_checkpoint(folder, state_at(10_000), generation=0)
    assert all("." not in path.name for path in folder.iterdir())
