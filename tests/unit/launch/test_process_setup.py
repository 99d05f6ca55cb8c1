"""A rank's process before torch: signals wait, and the process ends with its parent."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from stretto.launch.process_setup import (
    BLOCKED_SIGNALS,
    block_stop_signals,
    quiet_torch,
    unblock_stop_signals,
)


def blocked():
    return signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_stop_signals_are_blocked_inside_only():
    before = blocked()
    with block_stop_signals():
        assert blocked() == before | set(BLOCKED_SIGNALS)
    assert blocked() == before


def test_a_blocked_signal_is_delivered_once_signals_are_unblocked():
    arrived = []
    before = signal.signal(signal.SIGUSR2, lambda number, _frame: arrived.append(number))
    try:
        with block_stop_signals():
            # To this thread: other threads of pytest do not block the signal.
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
            assert arrived == []
            unblock_stop_signals()
            assert arrived == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize(("given", "level"), [(None, "ERROR"), ("INFO", "INFO")])
def test_torch_is_quiet_unless_a_level_is_given(given, level, monkeypatch):
    # Set and taken away by monkeypatch, which puts back what there was before the test.
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", given or "")
    if given is None:
        monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    quiet_torch()
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == level


CHILD = """
import sys, time
from stretto.launch.process_setup import exit_with_parent
exit_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
PARENT = f"""
import os, subprocess, sys
environment = dict(os.environ, **{{name: str(os.getpid()) for name in sys.argv[1:]}})
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, env=environment)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.readline()
"""


@pytest.mark.multi
@pytest.mark.parametrize("names", [[], ["STRETTO_PARENT"]], ids=["its own", "as a variable says"])
def test_a_process_ends_when_its_parent_is_gone(names):
    command = [sys.executable, "-c", PARENT, *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.1)
        assert child.is_running()  # with its parent
        parent.kill()
    assert psutil.wait_procs([child], timeout=20)[0]
