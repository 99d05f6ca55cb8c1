"""Kill a lab at a random moment, start the next, and see that nothing of either is left.

    python benchmarks/lab_kills.py --count 20 --seed 7

One JSON object a trial, then a line that counts; exit status 1 if one failed. Needs root, iproute2.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

TOKEN_NAME = "STRETTO_LAB_KILLS"
"""A variable that marks every process of a trial, however deep."""

STORE = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""
"""A stand-in that listens at once: with the real one, most kills would hit the import of torch."""

LAB = """
import sys
from stretto.launch.lab.head import store_command
from stretto.launch.lab.plan import LabSpec
from stretto.launch.lab.run import run_in_lab
store = store_command if sys.argv[1] == "real" else lambda host: [sys.executable, "-c", sys.argv[2], host]
spec = LabSpec(hosts=int(sys.argv[3]), ranks_per_host=int(sys.argv[4]), bits_per_s=400_000_000)
result = run_in_lab(spec, sys.argv[5:], say=lambda line: print(line, file=sys.stderr), store=store)
print(result.reason, file=sys.stderr)
sys.exit(result.exit_code)
"""

BROOD = ["sh", "-c", "sleep 300 & setsid sleep 300 & exec sleep 300"]
"""A rank with one child in its process group and one that has left it."""

PING = """
import os, socket, time
from stretto.launch.lab.plan import address
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
    """What one kill led to."""

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
    for number in range(args.count):
        trial = kill_one(number, moments.uniform(0.0, args.latest_s), args.store)
        print(json.dumps({**asdict(trial), "passed": trial.passed}), flush=True)
        passed += trial.passed
    print(f"{passed} passed, {args.count - passed} failed")
    return 0 if passed == args.count else 1


def kill_one(number: int, after_s: float, store: str) -> Trial:
    """Start a lab, kill it after ``after_s``, run another, and look around."""
    token = f"{os.getpid()}.{number}"
    before = traces(token)
    victim = start_lab(token, store, hosts=3, ranks_per_host=2, command=BROOD)
    time.sleep(after_s)  # the moment of the kill is what is being varied
    victim.kill()
    victim.communicate()
    survivor = start_lab(
        token, store, hosts=2, ranks_per_host=1, command=[sys.executable, "-c", PING]
    )
    _, said = survivor.communicate(timeout=180)
    left = sorted(traces(token) - before)
    return Trial(number, round(after_s, 3), survivor.returncode, said.decode(), left)


def start_lab(
    token: str, store: str, *, hosts: int, ranks_per_host: int, command: list[str]
) -> subprocess.Popen[bytes]:
    """Start a lab in a process of its own."""
    shape = [str(hosts), str(ranks_per_host)]
    return subprocess.Popen(
        [sys.executable, "-c", LAB, store, STORE, *shape, *command],
        env={**os.environ, TOKEN_NAME: token},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def traces(token: str) -> set[str]:
    """Return what labs leave on a machine, found without the lab's own code."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    locks = [path for path in Path("/run/stretto").glob("*") if path.is_file()]
    return {
        *(f"namespace {line.split()[0]}" for line in listed.stdout.splitlines()),
        *(f"link {line.split()[1]}" for line in links.stdout.splitlines()),
        *(f"lock {path.name}" for path in locks),
        *(f"process {pid}" for pid in marked_processes(token)),
    }


def marked_processes(token: str) -> list[int]:
    """Return the processes whose environment carries the token."""
    mark = f"{TOKEN_NAME}={token}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it ended while we looked
    return found


if __name__ == "__main__":
    sys.exit(main())
