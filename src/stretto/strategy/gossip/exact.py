"""All models become their exact mean, in one round of all ranks; momentum stays each rank's own.

What is under way is waited for. Of differences it does not count: those of one round, over all
ranks, are zero together, so the mean is the same without them. Of pushed shares it does: values
times mass and what has been heard are all there is, and masses begin again at 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.comm.channel import Channel
from stretto.comm.courier import Courier
from stretto.sim.choosing import usual_table
from stretto.strategy.gossip.mixer import Mixer


class ExactAverage:
    """Sums prepared once, one for all segments of a type and device; all ranks make it together.

    It may use the lanes that rounds of gossip and sums inside groups use: none is under way on any
    of them when it begins, and none begins before it is over. Keeps one more copy of the model, of
    32 bits or more. Members of a group count one by one: their mean is that of groups.
    """

    def __init__(self, mixers: Sequence[Mixer], channel: Channel, courier: Courier) -> None:
        self._size, self._courier = channel.size, courier
        alike: dict[tuple[torch.dtype, torch.device], list[Mixer]] = {}
        for mixer in mixers:
            kind = mixer.values[0].dtype, mixer.values[0].device
            alike.setdefault(kind, []).append(mixer)
        rooms = [_room(group) for group in alike.values()]
        table = usual_table(channel.mesh, on_gpu=any(room.is_cuda for room in rooms))
        schedules = [table.pick(room.nbytes).schedule(channel.mesh) for room in rooms]
        self._errands = self._courier.prepare_all(schedules, rooms)
        self._views = [
            placed
            for group, room in zip(alike.values(), rooms, strict=True)
            for placed in zip(group, _views(group, room), strict=True)
        ]

    @torch.no_grad()
    def __call__(self) -> None:
        """Make every segment the mean of all ranks', with nothing under way."""
        for mixer, views in self._views:
            mixer.wait()
            torch._foreach_copy_(views, mixer.whole())
        for errand in self._errands:
            self._courier.run(errand)
            errand.flat.div_(self._size)
        for mixer, views in self._views:
            mixer.begin_again(views)


def _room(mixers: Sequence[Mixer]) -> Tensor:
    """Return a flat tensor for all values, in which a sum of 16 bits is not rounded on its way."""
    values = [value for mixer in mixers for value in mixer.values]
    kept = torch.promote_types(values[0].dtype, torch.float32)
    return torch.empty(sum(v.numel() for v in values), dtype=kept, device=values[0].device)


def _views(mixers: Sequence[Mixer], room: Tensor) -> list[list[Tensor]]:
    """Return the room cut up: a list of views for each segment, shaped as its values."""
    parts = iter(room.split([value.numel() for mixer in mixers for value in mixer.values]))
    return [[next(parts).view(value.shape) for value in mixer.values] for mixer in mixers]
