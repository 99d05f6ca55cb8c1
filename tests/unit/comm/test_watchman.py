"""What is queued on a GPU and does not end is named; the GPU is played by functions."""

import subprocess
import sys
import threading

import pytest

from stretto.comm.watchman import Watchman


@pytest.fixture
def watchman():
    said, told = [], threading.Event()

    def give_up(reason):
        said.append(reason)
        told.set()

    made = Watchman(3, timeout_s=0.3, give_up=give_up)
    made.said, made.told = said, told
    return made


def test_what_does_not_end_is_named_after_the_time_out(watchman):
    watchman.watch("ring over 10 x torch.float32", lambda: True)
    watchman.watch("hierarchical/4 over 20 x torch.float32", lambda: False)
    watchman.watch("later", lambda: False)
    assert watchman.told.wait(10)
    assert watchman.said == [
        "rank 3: hierarchical/4 over 20 x torch.float32 is not over after 300 ms: a peer hangs, "
        "was killed, or does not take part"
    ]


def test_an_error_of_the_gpu_is_told_with_what_was_under_way(watchman):
    def lost():
        raise RuntimeError("CUDA error: unspecified launch failure\nmore lines")

    watchman.watch("ring over 10 x torch.float32", lost)
    assert watchman.told.wait(10)
    assert watchman.said == [
        "rank 3: ring over 10 x torch.float32 failed on the GPU: CUDA error: unspecified launch "
        "failure"
    ]


def test_what_ends_in_time_is_forgotten(watchman):
    watchman.watch("ring over 10 x torch.float32", lambda: True)
    assert not watchman.told.wait(0.8)
    assert not watchman._watched


LEAVING = """
import atexit
from stretto.comm.watchman import Watchman
atexit.register(print, "communicators are closed")
watchman = Watchman(0, timeout_s=60.0)
watchman.watch("ring over 10 x torch.float32", lambda: False)
watchman.endless = {endless}
raise SystemExit("lost a peer")
"""


@pytest.mark.parametrize("endless", [True, False])
def test_a_process_that_lost_a_peer_leaves_without_waiting_for_the_gpu(endless):
    program = LEAVING.format(endless=endless)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "lost a peer" in done.stderr
    assert ("communicators are closed" in done.stdout) == (not endless)
