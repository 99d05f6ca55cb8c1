import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto.errors import LaunchError
from stretto.launch.supervise import LauncherTimeouts, run_workers
from stretto.launch.worker_group import WorkerSpec, catch_signals, read_tail

FOREVER = "sleep 300"


def sh(script, *, rank=0, log=None, env=None, location=""):
    return WorkerSpec(rank, ["sh", "-c", script], env or {}, log, location)


def run(*workers, said=None, grace_s=5.0):
    timeouts = LauncherTimeouts(failing_s=grace_s)
    return run_workers(
        workers, log_line=(said if said is not None else []).append, timeouts=timeouts
    )


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def await_end(pid, within_s=10.0):
    deadline_s = time.monotonic() + within_s
    while is_running(pid) and time.monotonic() < deadline_s:
        os.sched_yield()
    return not is_running(pid)


def await_text(path, within_s=10.0):
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if path.exists() and path.read_text().endswith("\n"):
            return path.read_text()
        os.sched_yield()
    raise AssertionError(f"nothing in {path} after {within_s} s")


def test_the_exit_code_is_zero_if_all_workers_end_with_zero():
    assert run(sh("true"), sh("true", rank=1)).exit_code == 0


def test_no_workers_at_all_give_exit_code_zero():
    assert run().exit_code == 0


def test_a_worker_s_variables_are_added_to_our_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("STRETTO_TEST_OURS", "kept")
    log = tmp_path / "log"
    run(sh("echo $STRETTO_TEST_OURS $RANK", log=log, env={"RANK": "7"}))
    assert log.read_text() == "kept 7\n"


def test_a_worker_without_a_log_writes_to_our_own_output(capfd):
    run(sh("echo out; echo err >&2"))
    assert capfd.readouterr() == ("out\n", "err\n")


def test_the_failed_worker_is_named_with_its_location_code_and_last_output(tmp_path):
    log = tmp_path / "rank-1.log"
    failing = sh("seq 50; exit 3", rank=1, log=log, location="host 4")
    outcome = run(sh(FOREVER), failing)
    assert (outcome.exit_code, outcome.failed_rank) == (3, 1)
    last = "\n".join(str(number) for number in range(31, 51))
    assert outcome.reason == f"rank 1 on host 4 ended with exit code 3; the end of {log}:\n{last}"


def test_a_worker_killed_by_a_signal_is_named_with_the_signal():
    outcome = run(sh(FOREVER), sh("kill -SEGV $$", rank=1))
    assert (outcome.exit_code, outcome.failed_rank) == (128 + signal.SIGSEGV, 1)
    assert "rank 1 ended with signal SEGV" in outcome.reason


def test_a_failure_is_announced_in_one_line_before_the_others_are_ended():
    said = []
    run(sh(FOREVER), sh("exit 9", rank=1), said=said)
    assert said == ["rank 1 ended with exit code 9; ending the others"]


def test_the_others_are_asked_to_end_before_they_are_killed(tmp_path):
    ready, log = tmp_path / "ready", tmp_path / "log"
    polite = f"trap 'echo good bye; exit 0' TERM; echo > {ready}; while :; do sleep 0.02; done"
    failing = f"until [ -e {ready} ]; do sleep 0.02; done; exit 1"
    run(sh(polite, log=log), sh(failing, rank=1))
    assert log.read_text() == "good bye\n"


def test_a_worker_that_ignores_the_request_is_killed_after_the_grace_period(tmp_path):
    ready = tmp_path / "pid"
    deaf = f"trap '' TERM; echo $$ > {ready}; while :; do sleep 0.02; done"
    failing = f"until [ -s {ready} ]; do sleep 0.02; done; exit 1"
    run(sh(deaf), sh(failing, rank=1), grace_s=0.2)
    assert not is_running(int(ready.read_text()))


def test_child_processes_of_a_worker_are_killed_with_its_group(tmp_path):
    left = tmp_path / "pid"
    assert run(sh(f"{FOREVER} & echo $! > {left}")).exit_code == 0
    assert await_end(int(left.read_text()))


def test_a_program_that_does_not_exist_is_an_error_before_anything_starts(tmp_path):
    started = tmp_path / "started"
    missing = WorkerSpec(1, ["no-such-program"], {})
    with pytest.raises(LaunchError, match="no program 'no-such-program' on PATH"):
        run(sh(f"touch {started}"), missing)
    assert not started.exists()


def test_after_a_signal_before_the_start_no_worker_is_started(tmp_path):
    log = tmp_path / "log"
    with catch_signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        outcome = run_workers([sh("true", log=log)], log_line=lambda _: None, signals=signals)
    assert outcome.exit_code == 128 + signal.SIGTERM
    assert not log.exists()


def test_catch_signals_restores_the_handlers():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGCHLD)]
    with catch_signals():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGCHLD)] == before


LAUNCHER = """
import sys
from stretto.launch.worker_group import WorkerSpec
from stretto.launch.supervise import run_workers
worker = WorkerSpec(0, ["sh", "-c", sys.argv[1]], {})
outcome = run_workers([worker], log_line=lambda line: None)
print(outcome.reason)
sys.exit(outcome.exit_code)
"""


def start_launcher(script):
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, script], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("name", ["INT", "TERM", "USR1", "USR2"])
def test_a_signal_to_the_launcher_is_forwarded_and_ends_everything(tmp_path, name):
    # The worker catches the signal and ends with an exit code of its own.
    ready, trapped = tmp_path / "pid", tmp_path / "trapped"
    number = signal.Signals[f"SIG{name}"]
    trap = f"trap 'echo {name} > {trapped}; exit 7' {name}"
    with start_launcher(f"{trap}; echo $$ > {ready}; while :; do sleep 0.02; done") as launcher:
        worker = int(await_text(ready))
        launcher.send_signal(number)
        assert launcher.communicate()[0] == f"ended by {name}; rank 0 ended with exit code 7\n"
    assert launcher.returncode == 128 + number
    assert trapped.read_text() == f"{name}\n"
    assert not is_running(worker)


def test_workers_die_with_a_launcher_that_is_killed(tmp_path):
    ready = tmp_path / "pid"
    with start_launcher(f"echo $$ > {ready}; exec {FOREVER}") as launcher:
        worker = int(await_text(ready))
        launcher.kill()
    assert await_end(worker)


def test_the_tail_of_a_long_log_is_its_last_lines(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert read_tail(log, num_lines=2) == "line 99998\nline 99999"
