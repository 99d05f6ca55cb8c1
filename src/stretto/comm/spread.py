"""Make tensors equal on all ranks: rank 0's, or the mean; and hand rank 0 those of everybody."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from stretto.comm.algorithms import broadcast
from stretto.comm.channel import Channel, Parcel
from stretto.comm.execute import execute
from stretto.comm.small import add_up_


@torch.no_grad()
def spread_from_rank_0_(tensors: Iterable[Tensor], channel: Channel) -> None:
    """Overwrite ``tensors`` with those of rank 0; one message per type; all ranks together."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype, tensor.device].append(tensor.detach())
    for group in groups.values():
        flat = _flatten_dense_tensors(group)
        # Bytes travel: whatever the type (bool, int64, bf16), the back end need not know it.
        execute(broadcast(channel.size), flat.view(torch.uint8), channel)
        for tensor, value in zip(group, _unflatten_dense_tensors(flat, group), strict=True):
            tensor.copy_(value)


@torch.no_grad()
def average_(tensors: list[Tensor], channel: Channel) -> None:
    """Overwrite ``tensors`` with their mean over ranks, added in float64; all ranks together."""
    if not tensors:
        return
    flat = _flatten_dense_tensors([tensor.detach().double() for tensor in tensors])
    add_up_(flat, channel)
    flat.div_(channel.size)
    for tensor, value in zip(tensors, _unflatten_dense_tensors(flat, tensors), strict=True):
        tensor.copy_(value)


@torch.no_grad()
def gather_to_rank_0(tensors: Sequence[Tensor], channel: Channel) -> list[list[Tensor]]:
    """Return on rank 0 the ``tensors`` of every rank, bit for bit, by rank; elsewhere nothing.

    All ranks call this together, with the same types, shapes and kinds of device; one message from
    each for every kind: counts of an optimizer may lie with the host, its momentum on a GPU.
    """
    of_ranks: list[dict[int, Tensor]] = [{} for _ in range(0 if channel.rank else channel.size)]
    for places in by_device(tensors):
        group = [tensors[place] for place in places]
        for found, row in zip(of_ranks, _rows_of_ranks(as_bytes(group), channel), strict=True):
            found.update(zip(places, _from_bytes(row, group), strict=True))
    return [[found[place] for place in range(len(tensors))] for found in of_ranks]


def by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the places of those that lie on one device, together; devices as they come first."""
    places: dict[torch.device, list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        places[tensor.device].append(place)
    return list(places.values())


def _rows_of_ranks(own: Tensor, channel: Channel) -> list[Tensor]:
    """Return on rank 0 what every rank calls its ``own``; elsewhere nothing."""
    if channel.rank:
        channel.exchange([Parcel(0, own)], [])
        return []
    rows = [own, *(torch.empty_like(own) for _ in range(1, channel.size))]
    channel.exchange([], [Parcel(peer, row) for peer, row in enumerate(rows) if peer])
    return rows


def as_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of ``tensors``, one after another, as a new tensor."""
    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])


def _from_bytes(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.nbytes for tensor in like])
    # Cloned: a wider type may not begin at any byte.
    return [
        part.clone().view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]


def spread_text(text: str, channel: Channel) -> str:
    """Return rank 0's ``text`` on every rank; all ranks together."""
    data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    length = torch.tensor([len(text.encode())])
    spread_from_rank_0_([length], channel)
    if channel.rank:
        data = torch.zeros(max(1, int(length)), dtype=torch.uint8)
    spread_from_rank_0_([data], channel)
    return bytes(data[: int(length)].tolist()).decode()
