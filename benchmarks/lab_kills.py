"""Kill a lab at a random moment, start the next one, and check that nothing of either is left.

    python benchmarks/lab_kills.py --count 20 --seed 7

Prints a JSON object per trial, then the count; the exit status is 1 if a trial failed. Needs root
and iproute2.
"""

import argparse
import fcntl
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

TOKEN_NAME = "STRETTO_LAB_KILLS"
"""Environment variable of every process of a trial, inherited by children."""

LOCKS = Path("/run/stretto")

STORE = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""
"""Listens at once instead of the real store, whose import of torch most kills would hit."""

LAB = """
import sys
from stretto.lab.run_in_lab import store_command
from stretto.lab.spec import LabSpec
from stretto.lab.run_in_lab import run_in_lab
def print_line(line):
    print(line, file=sys.stderr)
def plain(host):
    return [sys.executable, "-c", sys.argv[2], host]
store = store_command if sys.argv[1] == "real" else plain
spec = LabSpec(hosts=int(sys.argv[3]), ranks_per_host=int(sys.argv[4]), bits_per_s=400_000_000)
result = run_in_lab(spec, sys.argv[5:], log_line=print_line, store=store)
print(result.reason, file=sys.stderr)
sys.exit(result.exit_code)
"""

BROOD = ["sh", "-c", "sleep 300 & setsid sleep 300 & exec sleep 300"]
"""A rank with one child in its process group and one that has left it."""

PING = """
import os, socket, time
from stretto.lab.spec import address
host, hosts = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
def reach(peer):
    while True:
        try:
            return socket.create_connection((address(peer), 5000), timeout=10)
        except ConnectionRefusedError:
            time.sleep(0.01)  # the peer's rank is not up yet
with socket.create_server((address(host), 5000)) as listener:
    listener.settimeout(20)
    right = reach((host + 1) % hosts)
    left, _ = listener.accept()
    right.sendall(b"ping")
    assert left.recv(4, socket.MSG_WAITALL) == b"ping"
    left.sendall(b"pong")
    assert right.recv(4, socket.MSG_WAITALL) == b"pong"
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one kill."""

    trial: int
    after_s: float
    next_exit_code: int
    next_said: str
    left: list[str]

    @property
    def passed(self) -> bool:
        """Return whether the next lab worked and nothing was left after it."""
        return self.next_exit_code == 0 and not self.left


def main() -> int:
    """Run the trials and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--latest-s", type=float, default=3.0, help="kill no later than this")
    parser.add_argument("--store", choices=("plain", "real"), default="plain")
    args = parser.parse_args()
    moments = random.Random(args.seed)
    passed = 0
    with tempfile.TemporaryDirectory() as logs:
        os.environ["TMPDIR"] = logs
        for number in range(args.count):
            trial = kill_one(number, moments.uniform(0.0, args.latest_s), args.store)
            row = {**asdict(trial), "passed": trial.passed}
            if trial.passed:
                del row["next_said"]  # of interest only after a failure
            print(json.dumps(row), flush=True)
            passed += trial.passed
    print(f"{passed} passed, {args.count - passed} failed")
    return 0 if passed == args.count else 1


def kill_one(number: int, after_s: float, store: str) -> Trial:
    """Start a lab, kill it after ``after_s``, run another one, and look for remains."""
    token = f"{os.getpid()}.{number}"
    before = traces(token)
    # Its output is discarded: a process that survives the kill would keep a pipe open.
    victim = start_lab(token, [store, STORE, "3", "2", *BROOD], output=subprocess.DEVNULL)
    time.sleep(after_s)  # the moment of the kill varies
    victim.kill()
    victim.wait()
    ping = [sys.executable, "-c", PING]
    survivor = start_lab(token, [store, STORE, "2", "1", *ping], output=subprocess.PIPE)
    said = survivor.communicate(timeout=180)[1].decode()
    left = sorted(traces(token) - before)
    return Trial(number, round(after_s, 3), survivor.returncode, said, left)


def start_lab(token: str, arguments: list[str], *, output: int) -> subprocess.Popen[bytes]:
    """Start a lab in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", LAB, *arguments],
        env={**os.environ, TOKEN_NAME: token},
        stdout=output,
        stderr=output,
    )


def traces(token: str) -> set[str]:
    """Return what dead labs left on this machine, found without the lab's own code."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    locks = {path.name for path in LOCKS.glob("lab-*.lock")}
    live = {name.removeprefix("lab-").removesuffix(".lock") for name in locks if is_held(name)}
    named = {f"namespace {path.name}" for path in Path("/run/netns").glob("stretto-*")}
    named |= {f"lock {name}" for name in locks}
    named |= {f"link {line.split()[1]}" for line in links.stdout.splitlines()}
    ours = {name for name in named if not any(lab_id in name for lab_id in live)}
    return ours | {f"process {pid}" for pid in marked_processes(token)}


def is_held(name: str) -> bool:
    """Return whether a live lab of another user of this machine holds this lock."""
    try:
        with (LOCKS / name).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True  # or it has just been removed, so nothing is left
    return False


def marked_processes(token: str) -> list[int]:
    """Return the processes whose environment contains the token."""
    mark = f"{TOKEN_NAME}={token}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


if __name__ == "__main__":
    sys.exit(main())
