"""Linear problems with whole numbers, solved in a process of their own that can be ended.

HiGHS looks at its time limit between steps, and a step may take long: so somebody must be able to
end it. The process is this file, which needs nothing but SciPy::

    python solving.py        reads problems from its input, writes solutions to its output
"""

import io
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Timer
from types import TracebackType
from typing import IO

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[np.float64]]
_PATIENCE_S = 1.0
"""How much longer than asked for a solver may take."""


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solver found in its time."""

    x: NDArray[np.float64] | None
    """The best it has, if any."""
    bound: float
    """No solution costs less."""
    prices: NDArray[np.float64]
    """By row: what one more of its upper bound would save; known where all are fractions."""


class Solver:
    """A process that solves one problem after another."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> "Solver":
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def solve(self, arrays: Arrays, *, whole: bool, limit_s: float) -> Solution | None:
        """Return what is found within ``limit_s``; None if nothing is, or the process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        told = {"limit_s": np.array([limit_s]), "whole_numbers": np.array([float(whole)])}
        end = Timer(limit_s + _PATIENCE_S, self._process.kill)
        end.start()
        try:
            _write(self._process.stdin, {**arrays, **told})
            found = _read(self._process.stdout)
        except OSError:
            return None
        finally:
            end.cancel()
        if found is None:
            return None
        x = found["x"] if found["x"].size else None
        return Solution(x, float(found["bound"][0]), found["prices"])


def _write(stream: IO[bytes], arrays: Arrays) -> None:
    packed = io.BytesIO()
    np.savez(packed, allow_pickle=False, **arrays)
    stream.write(struct.pack("<q", packed.tell()) + packed.getvalue())
    stream.flush()


def _read(stream: IO[bytes]) -> dict[str, NDArray[np.float64]] | None:
    head = stream.read(8)
    if len(head) < 8:
        return None
    size = struct.unpack("<q", head)[0]
    body = stream.read(size)
    if len(body) < size:  # ended while it answered
        return None
    with np.load(io.BytesIO(body), allow_pickle=False) as packed:
        return dict(packed)


def _serve() -> None:
    import scipy.optimize  # noqa: F401 - now, while the problem is still being posed

    with suppress(BrokenPipeError):
        while (problem := _read(sys.stdin.buffer)) is not None:
            _write(sys.stdout.buffer, _solve(problem))


def _solve(problem: Arrays) -> Arrays:
    from scipy.sparse import csr_matrix

    rows, columns = problem["rows"].astype(int), problem["columns"].astype(int)
    shape = (problem["lower"].size, problem["cost"].size)
    matrix = csr_matrix((problem["values"], (rows, columns)), shape=shape)
    limit_s = float(problem["limit_s"][0])
    if problem["whole_numbers"][0]:
        return _solve_whole(problem, matrix, limit_s)
    return _solve_fractions(problem, matrix, limit_s)


def _solve_whole(problem: Arrays, matrix: object, limit_s: float) -> Arrays:
    from scipy.optimize import Bounds, LinearConstraint, milp

    found = milp(
        problem["cost"],
        integrality=problem["whole"],
        bounds=Bounds(0, problem["upper"]),
        constraints=LinearConstraint(matrix, problem["lower"], problem["upper_rows"]),
        options={"time_limit": limit_s, "mip_rel_gap": float(problem["gap"][0])},
    )
    bound = found.mip_dual_bound if found.mip_dual_bound is not None else -np.inf
    x = found.x if found.x is not None else np.zeros(0)
    return {"x": x, "bound": np.array([bound]), "prices": np.zeros(0)}


def _solve_fractions(problem: Arrays, matrix: object, limit_s: float) -> Arrays:
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
    prices = np.zeros(lower.size)
    if found.status != 0:
        return {"x": np.zeros(0), "bound": np.array([-np.inf]), "prices": prices}
    prices[above] = -found.ineqlin.marginals[: int(above.sum())]
    return {"x": found.x, "bound": np.array([found.fun]), "prices": prices}


if __name__ == "__main__":
    _serve()
