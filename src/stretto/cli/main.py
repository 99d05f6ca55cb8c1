"""``stretto``: the command line's entry point; commands are imported when they are used."""

import atexit
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn, TextIO

from cyclopts import App, CycloptsError

from stretto.errors import StrettoError
from stretto.renamed import RenamedWarning

COMMANDS = {
    "demo": ("stretto.cli.demo:demo", "Train the embedded default with 1 and 4 workers; report."),
    "train": ("stretto.cli.train:train", "Train a run file; under torchrun, srun, mpirun, join."),
    "recipe": ("stretto.cli.recipe:recipe", "List published runs; derive their settings."),
    "export": ("stretto.cli.export:export", "Write a run's backbone for another task."),
    "slurm": ("stretto.cli.slurm:slurm", "Write a run as a batch job for Slurm; submit it."),
    "doctor": (
        "stretto.cli.doctor:doctor",
        "Check machine, launcher, peers, ports, disk, clocks and time-outs.",
    ),
    "lab": ("stretto.cli.lab:lab", "Run a command on an emulated cluster with slow links."),
    "show": ("stretto.cli.show:show", "Draw a collective's schedule, step by step."),
    "calibrate": (
        "stretto.cli.calibrate:calibrate",
        "Measure links and algorithms; write a cluster's description.",
    ),
    "profile": (
        "stretto.cli.profile:profile",
        "Measure or estimate a run's model, unit by unit, and its messages.",
    ),
    "plan": (
        "stretto.cli.plan:plan",
        "Plan sharding and every message under a memory limit; explain it.",
    ),
    "simulate": (
        "stretto.cli.simulate:simulate",
        "Predict what collectives and steps cost on a described cluster.",
    ),
    "bench": ("stretto.cli.bench:bench", "Time steps and collectives against peers and bounds."),
    "study": (
        "stretto.cli.study:study",
        "Study accuracy and speed as workers, batches or hosts grow.",
    ),
}


def build_app() -> App:
    """Return the parser; help texts are here so that printing them imports nothing heavy."""
    app = App(
        name="stretto",
        help="Distributed training for PyTorch with explicit, checkable communication schedules.",
        version=_version,
        result_action="return_value",
    )
    for command, (path, text) in COMMANDS.items():
        app.command(path, name=command, help=text)
    return app


def run() -> NoReturn:
    """Run one command and end the process.

    A process that has used Gloo runs its exit handlers and then calls ``os._exit``, also after an
    error of any kind. A failed run may have a collective in flight, whose thread must not outlive
    the interpreter (see the note on threads in `stretto.comm.gloo`).
    """
    _print_renamed_warnings()
    try:
        code = main()
    except Exception:  # noqa: BLE001 - shown as the interpreter would show it
        sys.excepthook(*sys.exc_info())
        code = 1
    if "stretto.comm.gloo" not in sys.modules:
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or the reader has gone
            stream.flush()
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0 done, 1 the run failed, 2 invalid usage."""
    try:
        code = build_app()(arguments, exit_on_error=False, print_error=True, help_on_error=False)
    except CycloptsError:
        return 2
    except StrettoError as failure:
        sys.stderr.write(f"stretto: {failure}\n")
        return failure.exit_code
    except BrokenPipeError:
        # The reader has closed the pipe: nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as failure:
        sys.stderr.write(f"stretto: {failure}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("stretto: interrupted\n")
        return 130
    return code if isinstance(code, int) else 0


def _version() -> str:
    from importlib.metadata import version

    return version("stretto")


def _print_renamed_warnings() -> None:
    """Print warnings about renamed settings as one plain line, other warnings as Python does."""
    show = warnings.showwarning

    def show_plainly(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, RenamedWarning):
            sys.stderr.write(f"stretto: {message}\n")
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_plainly
