"""Solve mixed-integer linear programs (MILPs) with HiGHS in a child process that can be killed.

HiGHS checks its time limit only between steps, and one step may take long. The parent therefore
kills the process when the limit is exceeded. The child runs this file, which needs only NumPy and
SciPy: it reads problems from its standard input and writes solutions to its standard output.
"""

import io
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Timer
from types import TracebackType
from typing import IO

import numpy as np
from numpy.typing import NDArray

SolverArrays = Mapping[str, NDArray[np.float64]]
GRACE_S = 1.0
"""Seconds after the time limit at which the process is killed."""


@dataclass(slots=True)
class ConstraintRows:
    """The rows of a sparse constraint matrix, with their lower and upper bounds."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def add(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> int:
        """Add ``lower <= sum of value * column <= upper`` and return the number of the row."""
        row = len(self.lower)
        for column, value in terms:
            self.rows.append(row)
            self.columns.append(column)
            self.values.append(value)
        self.lower.append(lower)
        self.upper.append(upper)
        return row


@dataclass(frozen=True, slots=True)
class MilpProblem:
    """Minimise ``cost @ x`` where ``0 <= x <= upper`` and some elements of x are integers."""

    cost: NDArray[np.float64]
    upper: NDArray[np.float64]
    integral: NDArray[np.float64]
    """1 where x must be an integer, else 0."""
    rows: ConstraintRows
    memory_rows: tuple[int, ...]
    """The number of the memory constraint's row, for each interval."""
    base_s: float
    """Seconds of a step that no choice changes; the cost is added to them."""
    slack_s: float
    """The most that tie-breaking costs can add to the cost, in seconds."""


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver found within its time limit."""

    x: NDArray[np.float64] | None
    """The best solution found; None if there is none."""
    bound: float
    """A lower bound on the cost of every solution."""
    duals: NDArray[np.float64]
    """Dual value of each row: the cost saved per extra unit of its upper bound.

    Empty if integers were required: only the continuous relaxation has duals.
    """


_idle_processes: list["subprocess.Popen[bytes]"] | None = None
"""Processes that wait for the next `Solver`; None unless they are kept."""


@contextmanager
def keep_solver_processes() -> Iterator[None]:
    """Keep the processes of solvers for later ones: each takes half a second to start."""
    global _idle_processes
    if _idle_processes is not None:  # an outer caller keeps them
        yield
        return
    _idle_processes = []
    try:
        yield
    finally:
        idle, _idle_processes = _idle_processes, None
        for process in idle:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


class Solver:
    """A child process that solves problems one after another. Use it as a context manager."""

    def __init__(self) -> None:
        self._is_reusable = True
        if _idle_processes:
            self._process = _idle_processes.pop()
            return
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> "Solver":
        """Return the solver."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill the process, or keep it for the next solver."""
        if _idle_processes is not None and self._is_reusable:
            _idle_processes.append(self._process)
        else:
            _end(self._process)

    def solve(self, arrays: SolverArrays, *, integral: bool, limit_s: float) -> Solution | None:
        """Solve a problem within ``limit_s`` seconds.

        Args:
            arrays: The problem, as arrays by name.
            integral: Whether to require integers; otherwise the continuous relaxation is solved.
            limit_s: The time limit.

        Returns:
            The solution, or None if the process died or was killed at the limit.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._is_reusable = False  # until the whole answer has been read
        limits = {"limit_s": np.array([limit_s]), "whole_numbers": np.array([float(integral)])}
        end = Timer(limit_s + GRACE_S, self._process.kill)
        end.start()
        try:
            write_arrays(self._process.stdin, {**arrays, **limits})
            found = read_arrays(self._process.stdout)
        except OSError:
            return None
        finally:
            end.cancel()
        if found is None:
            return None
        self._is_reusable = True
        x = found["x"] if found["x"].size else None
        return Solution(x, float(found["bound"][0]), found["duals"])


def write_arrays(stream: IO[bytes], arrays: SolverArrays) -> None:
    """Write arrays by name, behind their length in bytes."""
    packed = io.BytesIO()
    np.savez(packed, allow_pickle=False, **arrays)
    stream.write(struct.pack("<q", packed.tell()) + packed.getvalue())
    stream.flush()


def read_arrays(stream: IO[bytes]) -> dict[str, NDArray[np.float64]] | None:
    """Return what `write_arrays` wrote; None if the stream ends before."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    size = struct.unpack("<q", head)[0]
    body = stream.read(size)
    if len(body) < size:  # the process was killed while it wrote its answer
        return None
    with np.load(io.BytesIO(body), allow_pickle=False) as packed:
        return dict(packed)


def _serve() -> None:
    import scipy.optimize  # noqa: F401 - slow; import it while the parent builds the problem

    with suppress(BrokenPipeError):
        while (problem := read_arrays(sys.stdin.buffer)) is not None:
            write_arrays(sys.stdout.buffer, _solve(problem))


def _solve(problem: SolverArrays) -> SolverArrays:
    from scipy.sparse import csr_matrix

    rows, columns = problem["rows"].astype(int), problem["columns"].astype(int)
    shape = (problem["lower"].size, problem["cost"].size)
    matrix = csr_matrix((problem["values"], (rows, columns)), shape=shape)
    limit_s = float(problem["limit_s"][0])
    if problem["whole_numbers"][0]:
        return _solve_milp(problem, matrix, limit_s)
    return _solve_lp(problem, matrix, limit_s)


def _solve_milp(problem: SolverArrays, matrix: object, limit_s: float) -> SolverArrays:
    from scipy.optimize import Bounds, LinearConstraint, milp

    found = milp(
        problem["cost"],
        integrality=problem["integral"],
        bounds=Bounds(0, problem["upper"]),
        constraints=LinearConstraint(matrix, problem["lower"], problem["upper_rows"]),
        options={"time_limit": limit_s, "mip_rel_gap": float(problem["gap"][0])},
    )
    bound = found.mip_dual_bound if found.mip_dual_bound is not None else -np.inf
    x = found.x if found.x is not None else np.zeros(0)
    return {"x": x, "bound": np.array([bound]), "duals": np.zeros(0)}


def _solve_lp(problem: SolverArrays, matrix: object, limit_s: float) -> SolverArrays:
    from scipy.optimize import linprog
    from scipy.sparse import vstack

    lower, upper = problem["lower"], problem["upper_rows"]
    equal = lower == upper
    above, below = ~equal & np.isfinite(upper), ~equal & np.isfinite(lower)
    found = linprog(
        problem["cost"],
        A_ub=vstack([matrix[above], -matrix[below]]),  # type: ignore[index]
        b_ub=np.concatenate([upper[above], -lower[below]]),
        A_eq=matrix[equal],  # type: ignore[index]
        b_eq=lower[equal],
        bounds=np.stack([np.zeros_like(problem["upper"]), problem["upper"]], axis=1),
        method="highs",
        options={"time_limit": limit_s},
    )
    duals = np.zeros(lower.size)
    if found.status != 0:
        return {"x": np.zeros(0), "bound": np.array([-np.inf]), "duals": duals}
    duals[above] = -found.ineqlin.marginals[: int(above.sum())]
    return {"x": found.x, "bound": np.array([found.fun]), "duals": duals}


if __name__ == "__main__":
    _serve()
