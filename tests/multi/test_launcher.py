import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import product

import pytest

from stretto.cluster.heartbeats import FailureReport
from stretto.launch.supervise import LauncherTimeouts, run_workers
from stretto.launch.worker_group import WorkerSpec
from stretto.launch.worker_output import ConsoleStreams

pytestmark = pytest.mark.multi

FOREVER = "exec sleep 300"


def workers_of(scripts, folder):
    return [
        WorkerSpec(rank, ["sh", "-c", script], {}, folder / f"rank-{rank}.log")
        for rank, script in enumerate(scripts)
    ]


def run(scripts, folder, *, said=None, console_streams=None, failure_report=None, **timeouts):
    return run_workers(
        workers_of(scripts, folder),
        log_line=(said if said is not None else []).append,
        timeouts=LauncherTimeouts(**timeouts),
        console_streams=console_streams or ConsoleStreams(io.StringIO(), io.StringIO()),
        failure_report=failure_report,
    )


def after(path, then):
    return f"until [ -e {path} ]; do sleep 0.02; done; {then}"


def await_text(path, within_s=10.0):
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if path.exists() and path.read_text().endswith("\n"):
            return path.read_text()
        os.sched_yield()
    raise AssertionError(f"nothing in {path} after {within_s} s")


@pytest.mark.parametrize("codes", list(product([0, 75, 3], repeat=2)))
def test_the_run_s_exit_code_is_a_failure_s_else_75_if_somebody_stopped(codes, tmp_path):
    outcome = run([f"exit {code}" for code in codes], tmp_path)
    assert outcome.exit_code == (3 if 3 in codes else max(codes))


def test_the_launcher_waits_for_the_others_when_one_rank_saved_and_stopped(tmp_path):
    gone = tmp_path / "gone"
    late = f"trap 'exit 9' TERM; {after(gone, 'sleep 0.3; exit 75')}"
    outcome = run([late, f"touch {gone}; exit 75"], tmp_path)
    assert (outcome.exit_code, outcome.failed_rank) == (75, None)
    assert outcome.reason == "stopped on request after saving; go on with --resume"


def test_a_rank_that_goes_on_after_the_others_stopped_is_ended_and_named(tmp_path):
    said = []
    outcome = run(["exit 75", f"echo busy; {FOREVER}"], tmp_path, said=said, saving_s=0.4)
    reason = "rank 1 did not end within 0.4 s of the first that saved and stopped"
    assert (outcome.exit_code, outcome.failed_rank) == (1, 1)
    assert outcome.reason == f"{reason}; the end of {tmp_path}/rank-1.log:\nbusy"
    assert said == [f"{reason}; ending it"]


def test_a_failure_while_others_stop_is_a_failure(tmp_path):
    gone = tmp_path / "gone"
    outcome = run([f"touch {gone}; exit 75", after(gone, "exit 4"), FOREVER], tmp_path)
    assert (outcome.exit_code, outcome.failed_rank) == (4, 1)


def test_a_rank_that_hangs_is_the_root_cause_even_if_another_ended_first(tmp_path):
    said = []
    report = FailureReport(2, "rank 2 silent for 30 s, last heartbeat at step 17", "silent")
    hung = f"trap 'echo stuck in the kitchen; exit 1' TERM; touch {tmp_path}/up; sleep 300 & wait"
    scripts = [after(tmp_path / "up", "echo lost rank 2; exit 1"), FOREVER, hung]
    outcome = run(scripts, tmp_path, said=said, failure_report=lambda: report)
    assert (outcome.exit_code, outcome.failed_rank) == (1, 2)
    tail = f"the end of {tmp_path}/rank-2.log:\nstuck in the kitchen"
    assert outcome.reason == f"{report.reason}; {tail}"
    assert said == ["rank 2 is silent; ending the others"]


def test_a_failure_report_shortly_after_the_first_exit_counts(tmp_path):
    looks = iter([None, None])
    report = FailureReport(1, "bad luck", "failed")
    outcome = run(["exit 1", FOREVER], tmp_path, failure_report=lambda: next(looks, report))
    assert outcome.failed_rank == 1
    assert outcome.reason.startswith("rank 1 failed: bad luck; it said nothing")


def test_a_rank_killed_shortly_after_another_ended_is_the_root_cause(tmp_path):
    gone = tmp_path / "gone"
    killed = after(gone, "sleep 0.1; kill -KILL $$")
    outcome = run([f"touch {gone}; exit 1", FOREVER, killed], tmp_path)
    assert (outcome.exit_code, outcome.failed_rank) == (137, 2)


def test_without_a_failure_report_the_rank_that_ended_is_the_root_cause(tmp_path):
    outcome = run([FOREVER, "exit 6"], tmp_path, failure_report=lambda: None)
    assert (outcome.exit_code, outcome.failed_rank) == (6, 1)


def test_a_reason_that_ends_the_log_is_printed_once(tmp_path):
    said, report = [], FailureReport(1, "no room", "failed")
    scripts = [FOREVER, "echo step 1; echo stretto: no room >&2; exit 2"]
    outcome = run(scripts, tmp_path, said=said, failure_report=lambda: report)
    assert said == ["rank 1 failed; ending the others"]
    assert outcome.reason == f"rank 1 failed: no room; its log is {tmp_path}/rank-1.log"


COLD_SOUP = """
import os
from torch import nn
from stretto.errors import StrettoError

class Soup(nn.Linear):
    spoons = 0

    def forward(self, inputs):
        self.spoons += 1
        if self.spoons == 3 and os.environ.get("RANK") == "1":
            raise {error}("the soup is cold")
        return super().forward(inputs.flatten(1))

def make():
    return Soup(3 * 16 * 16, 10)
"""


@pytest.mark.parametrize("error", ["StrettoError", "ValueError"])
def test_a_rank_s_failure_is_on_the_screen_twice_and_no_more(tmp_path, error):
    (tmp_path / "soup.py").write_text(COLD_SOUP.format(error=error))
    (tmp_path / "run.toml").write_text('[model]\nkind = "custom"\ntarget = "soup:make"\n')
    settings = ["data.size=16", "train.batch=6", "train.steps=9", "run.threads=1"]
    command = [sys.executable, "-m", "stretto", "train", "run.toml", *settings, "--workers", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    # A traceback also shows the line that raised, where a quotation mark follows.
    assert len(re.findall(r'the soup is cold(?!")', done.stderr)) == 2, done.stderr


def test_the_last_output_is_on_the_screen_and_in_the_log_before_the_outcome(tmp_path):
    console_streams, seen = ConsoleStreams(io.StringIO(), io.StringIO()), []

    def look(_line):
        seen.extend([console_streams.stdout.getvalue(), (tmp_path / "rank-0.log").read_text()])

    script = "seq 10000; printf 'the very last'; exit 5"
    run_workers(workers_of([script], tmp_path), log_line=look, console_streams=console_streams)
    spoken = "".join(f"{number}\n" for number in range(1, 10001)) + "the very last"
    assert seen == [f"{spoken}\n", spoken]


def test_equal_lines_of_two_ranks_are_one_line_on_the_screen(tmp_path):
    console_streams = ConsoleStreams(io.StringIO(), io.StringIO())
    one, two = (tmp_path / name for name in ("one", "two"))
    scripts = [
        "echo zero >&2",
        f"touch {one}; {after(two, 'echo hello')}",
        f"touch {two}; {after(one, 'echo hello')}",
    ]
    assert run(scripts, tmp_path, console_streams=console_streams).exit_code == 0
    assert console_streams.stderr.getvalue() == "zero\n[ranks 1-2] hello\n"


def test_a_worker_that_prints_more_than_a_pipe_holds_does_not_block(tmp_path):
    console_streams = ConsoleStreams(io.StringIO(), io.StringIO())
    flood = "yes 'the same again' | head -c 3000000"
    assert run(["true", flood], tmp_path, console_streams=console_streams).exit_code == 0
    assert (tmp_path / "rank-1.log").stat().st_size == 3_000_000
    assert len(console_streams.stderr.getvalue().splitlines()) < 1000


def test_a_process_that_inherited_a_worker_pipe_does_not_block_the_launcher(tmp_path):
    left = tmp_path / "pid"
    began_s = time.monotonic()
    try:
        script = f"setsid sleep 60 & echo $! > {left}; echo bye"
        assert run([script], tmp_path).exit_code == 0
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(left.read_text()), signal.SIGKILL)
    assert time.monotonic() - began_s < 30


LAUNCHER = """
import json, os, pathlib, sys
from stretto.launch.worker_group import WorkerGroup, WorkerSpec
from stretto.launch.supervise import LauncherTimeouts, run_workers
scripts, timeouts, is_deaf, held_up_by = json.loads(sys.argv[1])
def say(line):
    if is_deaf:
        raise OSError(5, "the terminal hung up")
def kill(group, at_once=WorkerGroup.kill):
    pathlib.Path(held_up_by).touch()
    for process in group._processes.values():
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    at_once(group)
if held_up_by:
    WorkerGroup.kill = kill
workers = [WorkerSpec(rank, ["sh", "-c", script], {}) for rank, script in enumerate(scripts)]
outcome = run_workers(workers, log_line=say, timeouts=LauncherTimeouts(**timeouts))
print(outcome.reason)
sys.exit(outcome.exit_code)
"""
ON = "while :; do sleep 0.02; done"


def launch(scripts, *, is_deaf=False, held_up_by="", **timeouts):
    arguments = json.dumps([scripts, timeouts, is_deaf, held_up_by])
    command = [sys.executable, "-c", LAUNCHER, arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def stop(launcher, *numbers, when):
    """Send signals, each once the files that it waits for are there; return code and reason."""
    with launcher:
        try:
            for number, paths in zip(numbers, when, strict=True):
                for path in paths:
                    await_text(path)
                launcher.send_signal(number)
            reason = launcher.communicate(timeout=20)[0]
        finally:
            launcher.kill()
    return launcher.returncode, reason.strip()


def saver(ready, name="TERM", *, code=75):
    return f"trap 'sleep 0.3; exit {code}' {name}; echo > {ready}; {ON}"


@pytest.mark.parametrize(
    ("name", "forwarded_as"), [("TERM", "TERM"), ("HUP", "TERM"), ("USR1", "USR1"), ("INT", "INT")]
)
def test_workers_that_save_on_a_signal_end_the_run_with_75(tmp_path, name, forwarded_as):
    ready = [tmp_path / str(rank) for rank in range(2)]
    launcher = launch([saver(path, forwarded_as) for path in ready])
    code, reason = stop(launcher, signal.Signals[f"SIG{name}"], when=[ready])
    assert (code, reason) == (75, f"stopped by {name} after saving; go on with --resume")


def test_a_run_that_finishes_on_one_rank_and_saves_on_another_is_stopped(tmp_path):
    ready = [tmp_path / str(rank) for rank in range(2)]
    scripts = [saver(path, code=code) for path, code in zip(ready, (75, 0), strict=True)]
    assert stop(launch(scripts), signal.SIGTERM, when=[ready])[0] == 75


def test_a_worker_that_dies_of_the_signal_ends_the_run_as_that_signal(tmp_path):
    ready = tmp_path / "ready"
    code, reason = stop(launch([f"echo > {ready}; {FOREVER}"]), signal.SIGUSR1, when=[[ready]])
    assert (code, reason) == (128 + signal.SIGUSR1, "ended by USR1")


def test_a_terminal_that_hung_up_does_not_keep_workers_from_saving(tmp_path):
    ready = tmp_path / "ready"
    launcher = launch([saver(ready)], is_deaf=True)
    assert stop(launcher, signal.SIGHUP, when=[[ready]])[0] == 75


def test_a_worker_that_does_not_end_in_time_is_killed(tmp_path):
    ready = [tmp_path / str(rank) for rank in range(2)]
    launcher = launch([saver(ready[0]), f"trap '' TERM; echo > {ready[1]}; {ON}"], saving_s=1.0)
    code, reason = stop(launcher, signal.SIGTERM, when=[ready])
    assert code == 128 + signal.SIGTERM
    assert reason == "ended by TERM; rank 1 did not end in time and had to be killed"


def test_a_second_signal_kills_at_once(tmp_path):
    ready, received = tmp_path / "ready", tmp_path / "received"
    deaf = f"trap 'echo > {received}' TERM; echo > {ready}; {ON}"
    numbers = (signal.SIGTERM, signal.SIGINT)
    code, reason = stop(launch([deaf], saving_s=300), *numbers, when=[[ready], [received]])
    assert code == 128 + signal.SIGTERM
    assert reason == "ended by TERM; rank 0 killed at once on INT"


def test_workers_that_saved_before_the_kill_of_a_second_signal_count_as_saved(tmp_path):
    # The launcher is held up between its last look and the kill, and both ranks end meanwhile.
    ready, received = (
        [tmp_path / f"{what}-{rank}" for rank in range(2)] for what in ("up", "received")
    )
    look_again = tmp_path / "second"
    scripts = [
        f"trap 'echo > {h}; {after(look_again, 'exit 75')}' INT; echo > {r}; {ON}"
        for r, h in zip(ready, received, strict=True)
    ]
    launcher = launch(scripts, held_up_by=str(look_again), saving_s=300)
    code, reason = stop(launcher, signal.SIGINT, signal.SIGINT, when=[ready, received])
    assert (code, reason) == (75, "stopped by INT after saving; go on with --resume")


def test_when_one_worker_fails_while_saving_the_others_are_killed_earlier(tmp_path):
    ready = [tmp_path / str(rank) for rank in range(2)]
    scripts = [saver(ready[0], code=7), f"trap '' TERM; echo > {ready[1]}; {ON}"]
    launcher = launch(scripts, saving_s=300, failing_s=0.2)
    code, reason = stop(launcher, signal.SIGTERM, when=[ready])
    assert code == 128 + signal.SIGTERM
    assert reason.startswith("ended by TERM; rank 0 ended with exit code 7; rank 1 did not end")
