"""``stretto``: the verbs, none of which is imported before it is asked for."""

import atexit
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from cyclopts import App, CycloptsError

from stretto.errors import StrettoError

VERBS = {
    "demo": ("stretto.cli.demo:demo", "Train the embedded default with 1 and 4 workers; report."),
    "train": ("stretto.cli.train:train", "Train a run file; under torchrun, srun, mpirun, join."),
    "recipe": ("stretto.cli.recipe:recipe", "List published runs; derive their settings."),
    "export": ("stretto.cli.export:export", "Write a run's backbone for another task."),
    "slurm": ("stretto.cli.slurm:slurm", "Write a run as a batch job for Slurm; submit it."),
    "doctor": (
        "stretto.cli.doctor:doctor",
        "Check machine, launcher, peers, ports, disk, clocks and time-outs.",
    ),
    "lab": ("stretto.cli.lab:lab", "Run a command on a cluster in a box with slow links."),
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
        "Predict what collectives and steps cost on a cluster not here.",
    ),
    "bench": ("stretto.cli.bench:bench", "Measure against the peer and the bound."),
    "study": (
        "stretto.cli.study:study",
        "See how accuracy and speed hold up as workers, batches or hosts grow.",
    ),
}


def build_app() -> App:
    """Return the parser; help texts stand here so that printing them imports nothing heavy."""
    app = App(
        name="stretto",
        help="Distributed training in which communication is data before it is action.",
        version=_version,
        result_action="return_value",
    )
    for verb, (path, text) in VERBS.items():
        app.command(path, name=verb, help=text)
    return app


def run() -> NoReturn:
    """Run one verb as a process, and end it.

    Who has talked to other ranks leaves at once, after everything that was to be done at exit: a
    run that failed may have a sum under way, whose thread must not outlive the interpreter (the
    note on threads in `stretto.comm.gloo`).
    """
    code = main()
    if "stretto.comm.gloo" not in sys.modules:
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it any more
            stream.flush()
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code: 0 done, 1 the run failed, 2 the caller's mistake."""
    try:
        code = build_app()(arguments, exit_on_error=False, print_error=True, help_on_error=False)
    except CycloptsError:
        return 2
    except StrettoError as failure:
        sys.stderr.write(f"stretto: {failure}\n")
        return failure.exit_code
    except BrokenPipeError:
        # Whoever read our output has had enough; nothing more can be said there.
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
