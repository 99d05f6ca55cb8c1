"""Consensus of gossiping ranks: estimate their distance from the mean, and average exactly.

All ranks sample the same coordinates of their parameters and sum them in one small all-reduce,
which is read a step later. With x_i the values of rank i, m their mean and w the number of
coordinates that each sampled one represents, the mean square distance from m is

    d2 = (1/n) sum over ranks of (sum of w x_i^2)  -  sum of w m^2

The squared norm of the mean is the mean squared norm of the models, which ranks know exactly, minus
d2.

Exact averages happen every so many steps, or when the distance exceeds a limit::

    begin           (step s+1) read the measurement; decide whether this step ends with an average
    backward        (step s) sample each segment before its update
    after_update    (step s) start the all-reduce of all samples; average exactly if due

All ranks decide alike without an extra message. The decision depends on the step number and on a
sum with the same bits on all ranks, never on a clock or on the arrival of messages.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.transport import Transport, Work
from stretto.config import Config
from stretto.errors import TransportError
from stretto.simulator.algorithm_choice import default_table
from stretto.strategies.gossip.mixer import SegmentMixer

MIN_COORDINATES = 8
"""Least number of sampled coordinates of a segment; a smaller segment is sampled completely."""
HASH_BLOCK = 1 << 20
"""Indices hashed at a time."""


def choose_coordinates(first: int, count: int, share: float) -> NDArray[np.int64]:
    """Return the sampled ones of ``count`` coordinates that start at index ``first``, from 0 on.

    A coordinate is sampled if its index hashes to less than ``share`` of the hash range. If these
    are too few, the `MIN_COORDINATES` with the smallest hashes are sampled.
    """
    blocks = range(0, count, HASH_BLOCK)
    found = [
        start + np.flatnonzero(_hash_indices(first + start, min(HASH_BLOCK, count - start)) < share)
        for start in blocks
    ]
    below = np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
    if len(below) >= min(MIN_COORDINATES, count):
        return below
    return np.sort(np.argsort(_hash_indices(first, count), kind="stable")[:MIN_COORDINATES])


class CoordinateSample(NamedTuple):
    """The sampled coordinates of all segments."""

    indices: list[NDArray[np.int64]]
    """Sampled indices of each segment, from 0 on."""
    weights: NDArray[np.float64]
    """Number of coordinates that each sampled one represents, for all segments in order."""


def sample_coordinates(sizes: Sequence[int], share: float) -> CoordinateSample:
    """Return the sampled coordinates of segments of ``sizes`` elements, in this order."""
    firsts = np.cumsum([0, *sizes]).tolist()
    indices = [
        choose_coordinates(first, count, share) for first, count in zip(firsts, sizes, strict=False)
    ]
    counts = [len(indices_of_segment) for indices_of_segment in indices]
    weights = [size / max(1, count) for size, count in zip(sizes, counts, strict=True)]
    return CoordinateSample(indices, np.repeat(np.array(weights), counts))


def _hash_indices(first: int, count: int) -> NDArray[np.float64]:
    """Return a hash in [0, 1) of each index, by the finalizer of SplitMix64.

    Steele, Lea and Flood, 2014, doi:10.1145/2660193.2660195.
    """
    word = np.arange(first + 1, first + 1 + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    word ^= word >> np.uint64(31)
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53


def distance(
    totals: NDArray[np.float64],
    weights: NDArray[np.float64],
    squares: float,
    norms: float,
    size: int,
) -> float:
    """Return the distance of ranks from their mean, relative to its norm, from sums over ranks.

    Sums are rounded once at the end (`math.fsum`). NumPy adds in an order that depends on the
    processor, so that ranks might decide differently.

    Args:
        totals: Sums of the sampled coordinates.
        weights: Number of coordinates that each sampled one represents.
        squares: Sum of the weighted squares of sampled coordinates.
        norms: Sum of the squared norms of the models.
        size: Number of ranks.
    """
    mean = totals / size
    squared_distance = max(0.0, squares / size - math.fsum((weights * (mean * mean)).tolist()))
    norm = norms / size - squared_distance
    if norm <= 0:
        return math.inf if squared_distance else 0.0
    return math.sqrt(squared_distance / norm)


class _SampledParameter(NamedTuple):
    """A parameter with its sampled coordinates."""

    value: Tensor
    indices: Tensor
    """Flat indices of the sampled elements."""
    samples: Tensor
    """View of the buffer that receives them."""


class ConsensusEstimator:
    """Estimates the distance of ranks from their mean by an all-reduce of sampled parameters."""

    def __init__(
        self, segments: Sequence[Sequence[Tensor]], share: float, transport: Transport
    ) -> None:
        self._transport = transport
        self._work: Work | None = None
        sizes = [sum(value.numel() for value in values) for values in segments]
        indices, self._weights = sample_coordinates(sizes, share)
        counts = [len(indices_of_segment) for indices_of_segment in indices]
        device = segments[0][0].device if segments else torch.device("cpu")
        self._samples = torch.zeros(sum(counts), dtype=torch.float64, device=device)
        self._norms = torch.zeros(len(segments), dtype=torch.float64, device=device)
        self._message = torch.zeros(sum(counts) + 2, dtype=torch.float64, device=device)
        self._device_weights = torch.from_numpy(self._weights).to(device)
        samples_of_segments = self._samples.split(counts)
        self._segments = [list(values) for values in segments]
        self._sampled = [
            list(_sampled_parameters(*each))
            for each in zip(self._segments, indices, samples_of_segments, strict=True)
        ]

    @torch.no_grad()
    def sample_segment(self, segment: int) -> None:
        """Sample the current values of a segment."""
        for sampled in self._sampled[segment]:
            sampled.samples.copy_(torch.take(sampled.value, sampled.indices))
        norms = torch._foreach_norm(self._segments[segment], 2, torch.float64)
        self._norms[segment] = torch.stack(norms).square().sum()

    def start_measurement(self) -> None:
        """Start the all-reduce of the samples of all segments."""
        self._message[:-2] = self._samples
        self._message[-2] = (self._device_weights * self._samples.square()).sum()
        self._message[-1] = self._norms.sum()
        self._work = self._transport.start_all_reduce(self._message)

    def read(self) -> float | None:
        """Wait for the measurement in flight and return its distance; None if there is none."""
        if self._work is None:
            return None
        self._work.wait()
        self._work = None
        sums = self._message.cpu().numpy()
        squares, norms = sums[-2:].tolist()
        return distance(sums[:-2], self._weights, squares, norms, self._transport.size)

    def close(self) -> None:
        """Wait for the measurement in flight."""
        with suppress(TransportError):  # the result is not needed any more
            self.read()


def _sampled_parameters(
    values: Sequence[Tensor], indices: NDArray[np.int64], samples: Tensor
) -> Iterator[_SampledParameter]:
    """Yield each parameter of a segment with its part of the segment's sampled indices."""
    ends = np.cumsum([0, *(value.numel() for value in values)])
    bounds = np.searchsorted(indices, ends).tolist()
    for value, first, start, end in zip(values, ends, bounds[:-1], bounds[1:], strict=False):
        flat_indices = torch.from_numpy(indices[start:end] - first).to(value.device)
        yield _SampledParameter(value, flat_indices, samples[start:end])


class ExactAverage:
    """All-reduces the models of all ranks to their exact mean; momentum stays local.

    Rounds in flight are waited for. Received differences are dropped: those of one round add up to
    zero over all ranks, so the mean is the same without them. Received push-sum shares are
    included, because values times mass plus shares in flight make up the sum; masses return to 1.

    The schedules are bound once, one for all segments of a type and device (collective). They may
    use the lanes of gossip rounds and group sums, because none of those is in flight during the
    average. It keeps one more copy of the model, of at least 32 bits. All members of a group count;
    as groups are of equal size, their mean is that of the groups.
    """

    def __init__(
        self, mixers: Sequence[SegmentMixer], transport: Transport, executor: CollectiveExecutor
    ) -> None:
        self._size, self._executor = transport.size, executor
        mixers_by_dtype: dict[tuple[torch.dtype, torch.device], list[SegmentMixer]] = {}
        for mixer in mixers:
            kind = mixer.values[0].dtype, mixer.values[0].device
            mixers_by_dtype.setdefault(kind, []).append(mixer)
        buffers = [_new_flat_buffer(group) for group in mixers_by_dtype.values()]
        table = default_table(transport.mesh, on_gpu=any(buffer.is_cuda for buffer in buffers))
        schedules = [table.pick(buffer.nbytes).schedule(transport.mesh) for buffer in buffers]
        self._bound_schedules = self._executor.prepare_all(schedules, buffers)
        self._views = [
            mixer_views
            for group, buffer in zip(mixers_by_dtype.values(), buffers, strict=True)
            for mixer_views in zip(group, _views(group, buffer), strict=True)
        ]

    @torch.no_grad()
    def __call__(self) -> None:
        """Set every segment to the mean of all ranks and drop the rounds in flight."""
        for mixer, views in self._views:
            mixer.wait()
            torch._foreach_copy_(views, mixer.values_to_average())
        for bound in self._bound_schedules:
            self._executor.run(bound)
            bound.flat.div_(self._size)
        for mixer, views in self._views:
            mixer.reset_to_mean(views)


def _new_flat_buffer(mixers: Sequence[SegmentMixer]) -> Tensor:
    """Return a flat tensor for all values, of at least 32 bits so that sums are not rounded."""
    values = [value for mixer in mixers for value in mixer.values]
    sum_dtype = torch.promote_types(values[0].dtype, torch.float32)
    return torch.empty(sum(v.numel() for v in values), dtype=sum_dtype, device=values[0].device)


def _views(mixers: Sequence[SegmentMixer], buffer: Tensor) -> list[list[Tensor]]:
    """Return views of ``buffer`` shaped as the values of each mixer."""
    parts = iter(buffer.split([value.numel() for mixer in mixers for value in mixer.values]))
    return [[next(parts).view(value.shape) for value in mixer.values] for mixer in mixers]


class ConsensusConfig(Config):
    """Settings of exact averages and of measurements of the consensus distance."""

    exact_every: int | None = Field(default=None, ge=1)
    """Steps between two exact averages of all models; None: never."""
    consensus_every: int | None = Field(default=None, ge=1)
    """Steps between two measurements of the ranks' distance from their mean; None: never."""
    consensus_sample: float = Field(default=0.001, gt=0, le=1)
    """Fraction of the parameters that a measurement samples."""
    consensus_limit: float | None = Field(default=None, gt=0)
    """Distance from the mean, relative to its norm, above which the models are averaged exactly."""

    @property
    def may_average_exactly(self) -> bool:
        """Whether exact averages are configured, by period or by limit."""
        return self.exact_every is not None or self.consensus_limit is not None

    def averages_exactly_after(self, step: int) -> bool:
        """Return whether ``step`` ends with a periodic exact average."""
        return self.exact_every is not None and (step + 1) % self.exact_every == 0

    def measures_in(self, step: int) -> bool:
        """Return whether ranks sample the parameters with which they begin ``step``."""
        return self.consensus_every is not None and (step + 1) % self.consensus_every == 0

    @model_validator(mode="after")
    def _check_limit(self) -> Self:
        if self.consensus_limit is not None and self.consensus_every is None:
            raise ValueError(
                f"consensus_limit = {self.consensus_limit:g} is a distance that nobody measures: "
                "say how often with strategy.consensus_every, 10 for example, or leave the limit "
                "out"
            )
        return self


class ConsensusController:
    """Measures the consensus distance and averages exactly when due; all calls are collective."""

    def __init__(
        self,
        config: ConsensusConfig,
        mixers: Sequence[SegmentMixer],
        transport: Transport,
        executor: CollectiveExecutor,
    ) -> None:
        self._config = config
        self._average = (
            ExactAverage(mixers, transport, executor) if config.may_average_exactly else None
        )
        segments = [mixer.values for mixer in mixers] if config.consensus_every else []
        self._estimator = ConsensusEstimator(segments, config.consensus_sample, transport)
        self._step = 0
        self._average_requested = False
        self._averaged_since = False
        self.due = False
        """Whether this step ends with an exact average."""
        self.consensus_distance: float | None = None
        """The distance from the mean that was read in this step; None if there was none."""

    def begin(self, step: int) -> None:
        """Read the measurement of the step before; decide whether ``step`` ends with an average."""
        self._read()
        self._step = step
        self.due = self._average_requested or self._config.averages_exactly_after(step)

    @property
    def is_measuring(self) -> bool:
        """Whether ranks sample their segments in this step."""
        return self._config.measures_in(self._step)

    def sample_segment(self, segment: int) -> None:
        """Sample a segment, if this step measures; call it before the segment's update."""
        if self.is_measuring:
            self._estimator.sample_segment(segment)

    def start_measurement(self) -> None:
        """Start the all-reduce of this step's samples, if it measures; call it after the update."""
        self.consensus_distance = None
        if self.is_measuring:
            self._estimator.start_measurement()
            self._averaged_since = self.due

    def average_exactly(self) -> None:
        """Set all models to their exact mean; the step must be `due`."""
        assert self._average is not None
        self._average()
        self.due = self._average_requested = False

    def state(self) -> dict[str, Tensor]:
        """Return the last distance and whether an average is requested; equal on all ranks."""
        self._read()
        if self._config.consensus_every is None:
            return {}
        consensus_distance = (
            math.nan if self.consensus_distance is None else self.consensus_distance
        )
        measured = torch.tensor(consensus_distance, dtype=torch.float64)
        return {"apart": measured, "asked": torch.tensor(self._average_requested)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned; an empty ``state`` means no measurement."""
        self._read()
        consensus_distance = float(state.get("apart", math.nan))
        self.consensus_distance = None if math.isnan(consensus_distance) else consensus_distance
        self._average_requested = self._config.may_average_exactly and bool(
            state.get("asked", False)
        )

    def close(self) -> None:
        """Wait for the measurement in flight and drop its result."""
        self._estimator.close()

    def _read(self) -> None:
        """Read the measurement, if there is one, and request an average if it exceeds the limit.

        No average is requested if one was made since the measurement.
        """
        consensus_distance, limit = self._estimator.read(), self._config.consensus_limit
        if consensus_distance is None:
            return
        self.consensus_distance = consensus_distance
        self._average_requested |= (
            limit is not None and consensus_distance > limit and not self._averaged_since
        )
