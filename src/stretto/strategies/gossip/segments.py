"""Segments: runs of consecutive parameters that gossip mixes separately.

Ways to cut a model: "whole"; "coarse", one segment per child of the model; "fine", also one per
block in a list of blocks; "balanced 8", eight segments of about equal bytes.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from torch import nn

from stretto.comm.transport import Work
from stretto.errors import ConfigError, StrettoError

NamedParameter = tuple[str, nn.Parameter]
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def cut_segments(model: nn.Module, spec: str) -> list[list[NamedParameter]]:
    """Return the trainable parameters of each segment, in registration order.

    Raises:
        ConfigError: ``spec`` is unknown, or the model has fewer parameters than segments.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    word, _, count = spec.partition(" ")
    if word == "balanced" and count.isdecimal() and int(count) >= 1:
        segment_keys = _balanced([p.nbytes for _, p in named], int(count))
    elif spec in _SEGMENT_KEYS:
        segment_keys = _SEGMENT_KEYS[spec](model, [name for name, _ in named])
    else:
        raise ConfigError(
            f"strategy.segments = {spec!r}: expected {', '.join(_SEGMENT_KEYS)}, or balanced 8"
        )
    return _group_neighbours(named, segment_keys)


def check_segments(spec: str) -> str:
    """Return ``spec`` if it names a way to cut segments.

    Raises:
        ConfigError: It does not.
    """
    cut_segments(nn.Linear(1, 1) if spec in _SEGMENT_KEYS else nn.Sequential(), spec)
    return spec


def _group_neighbours(
    named: Sequence[NamedParameter], segment_keys: Sequence[object]
) -> list[list[NamedParameter]]:
    """Group consecutive parameters with equal key, type and device."""
    groups: list[list[NamedParameter]] = []
    last: object = None
    for (name, parameter), segment_key in zip(named, segment_keys, strict=True):
        key = (segment_key, parameter.dtype, parameter.device)
        if not groups or key != last:
            groups.append([])
        groups[-1].append((name, parameter))
        last = key
    return groups


def _whole(_model: nn.Module, names: Sequence[str]) -> list[object]:
    return [0] * len(names)


def _coarse(_model: nn.Module, names: Sequence[str]) -> list[object]:
    return [name.partition(".")[0] for name in names]


def _fine(model: nn.Module, names: Sequence[str]) -> list[object]:
    return [_block_of(model, name) for name in names]


def _block_of(model: nn.Module, name: str) -> str:
    """Return the path of the outermost module around a parameter that is not a list of blocks."""
    path: list[str] = []
    module = model
    for part in name.split(".")[:-1]:
        module = module.get_submodule(part)
        path.append(part)
        if not _has_blocks(module):
            break
    return ".".join(path)


def _has_blocks(module: nn.Module) -> bool:
    """Return whether a module is a list of blocks: a container of modules with children."""
    parts = module.children() if isinstance(module, _CONTAINERS) else ()
    return any(next(part.children(), None) is not None for part in parts)


_SEGMENT_KEYS: dict[str, Callable[[nn.Module, Sequence[str]], list[object]]] = {
    "whole": _whole,
    "coarse": _coarse,
    "fine": _fine,
}


def _balanced(sizes: Sequence[int], count: int) -> list[object]:
    """Return the segment index of each parameter, such that no segment is empty."""
    if sizes and count > len(sizes):
        raise ConfigError(
            f"strategy.segments = 'balanced {count}': the model has {len(sizes)} trainable "
            f"parameters, none of which is cut: at most balanced {len(sizes)}"
        )
    total, segment_keys = sum(sizes), list[object]()
    for index, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        target = int((end - size / 2) * count / total)
        before = int(str(segment_keys[-1])) if segment_keys else -1
        lowest_allowed = count - (len(sizes) - index)
        segment_keys.append(
            max(min(target, before + 1), before if segment_keys else 0, lowest_allowed)
        )
    return segment_keys


class SegmentQueue:
    """Counts the gradients of segments and calls two functions for each segment, in a fixed order.

    ``sum_in_group`` is called once all gradients of the segment and of those before it have
    arrived; it starts the sum inside the rank's group. ``update_and_send`` is called once that sum
    has finished. Timing never changes the order of either.
    """

    def __init__(
        self,
        counts: Sequence[int],
        sum_in_group: Callable[[int], Work],
        update_and_send: Callable[[int], None],
    ) -> None:
        self._gradient_counts = counts
        self._sum_in_group, self._update_and_send = sum_in_group, update_and_send
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._missing = list(self._gradient_counts)
        self.started: list[Work] = []
        """Work of the segments that were started in this step, in order."""
        self._num_processed = 0

    def on_gradient(self, index: int) -> None:
        """Count a gradient of a segment and start complete segments; called by backward's hooks."""
        self._missing[index] -= 1
        if self._missing[index] < 0:
            raise StrettoError(
                f"segment {index} got a gradient after all of its gradients had arrived: backward "
                "ran again in the same step"
            )
        self._start_while(lambda: self._missing[len(self.started)] == 0)

    def process(self) -> None:
        """Process the segments whose work has finished, without waiting."""
        while self._num_processed < len(self.started) and _is_finished(
            self.started[self._num_processed]
        ):
            self._process_next()

    def start_rest(self) -> None:
        """Start all other segments; missing gradients belong to parameters that were not used."""
        self._start_while(lambda: True)

    def process_rest(self) -> None:
        """Process all started segments, even if they have to wait."""
        while self._num_processed < len(self.started):
            self._process_next()

    def _start_while(self, ready: Callable[[], bool]) -> None:
        while len(self.started) < len(self._missing) and ready():
            self.started.append(self._sum_in_group(len(self.started)))

    def _process_next(self) -> None:
        self._num_processed += 1
        self._update_and_send(self._num_processed - 1)


def _is_finished(work: Work) -> bool:
    return work.finished_s is not None
