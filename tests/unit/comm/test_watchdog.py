"""The GPU watchdog names work that does not finish; functions stand for the GPU."""

import subprocess
import sys
import threading

import pytest

from stretto.comm.nccl import GpuTimeoutWatchdog


@pytest.fixture
def watchdog():
    reasons, fired = [], threading.Event()

    def on_timeout(reason):
        reasons.append(reason)
        fired.set()

    made = GpuTimeoutWatchdog(3, timeout_s=0.3, on_timeout=on_timeout)
    made.reasons, made.fired = reasons, fired
    return made


def test_work_that_does_not_finish_is_named_after_the_time_out(watchdog):
    watchdog.watch_for_timeout("ring over 10 x torch.float32", lambda: True)
    watchdog.watch_for_timeout("hierarchical/4 over 20 x torch.float32", lambda: False)
    watchdog.watch_for_timeout("later", lambda: False)
    assert watchdog.fired.wait(10)
    assert watchdog.reasons == [
        "rank 3: hierarchical/4 over 20 x torch.float32 has not finished after 300 ms: a peer "
        "hangs, was killed, or does not take part"
    ]


def test_a_gpu_error_is_reported_with_the_running_work(watchdog):
    def lost():
        raise RuntimeError("CUDA error: unspecified launch failure\nmore lines")

    watchdog.watch_for_timeout("ring over 10 x torch.float32", lost)
    assert watchdog.fired.wait(10)
    assert watchdog.reasons == [
        "rank 3: ring over 10 x torch.float32 failed on the GPU: CUDA error: unspecified launch "
        "failure"
    ]


def test_work_that_finishes_in_time_is_dropped(watchdog):
    asked = []
    watchdog.watch_for_timeout("ring over 10 x torch.float32", lambda: asked.append(0) or True)
    assert not watchdog.fired.wait(0.8)
    assert len(asked) == 1  # it was polled several times since, and no longer asked about this


LEAVING = """
import atexit
from stretto.comm.nccl import GpuTimeoutWatchdog
atexit.register(print, "communicators are closed")
watchdog = GpuTimeoutWatchdog(0, timeout_s=60.0)
watchdog.watch_for_timeout("ring over 10 x torch.float32", lambda: False)
watchdog.is_gpu_stuck = {endless}
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
