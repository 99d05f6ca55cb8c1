"""Run a command and keep a record: the command, the machine, the output and the results.

    python benchmarks/record.py step_4x1_400mbit -- stretto lab ... -- stretto bench step --json

Writes ``benchmarks/records/DATE_NAME/``: command.txt, machine.json, log.txt, result.jsonl (the
lines of standard output that are JSON objects). Output also goes to the screen.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

RECORDS = Path(__file__).parent / "records"
ROOT = Path(__file__).parents[1]


def main() -> int:
    """Record one command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="followed by -- and the command")
    # Split by hand: argparse would also remove the command's own "--".
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, command = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    if not command:
        parser.error("give the command to run after --")
    code, _ = record(args.name, command)
    return code


def record(name: str, command: list[str]) -> tuple[int, list[dict[str, object]]]:
    """Run ``command`` in the project's folder and write its record.

    Returns the exit code and the JSON objects of the output.
    """
    folder = folder_of(name)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"recording {' '.join(command)}", file=sys.stderr)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    machine_before = machine()
    done = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "PATH": path}
    )
    assert done.stdout is not None
    lines = []
    for line in done.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    code = done.wait()
    results = [json.loads(line) for line in lines if line.startswith("{")]
    (folder / "command.txt").write_text(" ".join(command) + "\n")
    (folder / "machine.json").write_text(json.dumps(machine_before, indent=2) + "\n")
    (folder / "log.txt").write_text("".join(lines) + f"exit code {code}\n")
    (folder / "result.jsonl").write_text("".join(json.dumps(r) + "\n" for r in results))
    return code, results


def folder_of(name: str) -> Path:
    """Return the folder of today's record ``name``."""
    return RECORDS / f"{datetime.datetime.now(datetime.UTC).date()}_{name}"


def machine() -> dict[str, object]:
    """Return the facts that results depend on; the load shows other work before the start."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "commit": commit.stdout.strip(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_before": psutil.getloadavg()[0],
        "kernel": platform.release(),
        "tcp_allowed": _allowed_congestion(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "stretto": _version("stretto"),
    }


def _allowed_congestion() -> str:
    """Return the congestion control algorithms that a lab may use: cubic if it is there."""
    path = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    return path.read_text().strip() if path.exists() else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed: run from its source"


if __name__ == "__main__":
    sys.exit(main())
