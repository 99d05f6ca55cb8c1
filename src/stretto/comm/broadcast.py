"""Broadcasts, means and gathers of whole lists of tensors; texts that rank 0 makes for all."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from stretto.collectives.algorithms import broadcast
from stretto.comm.collective_executor import execute
from stretto.comm.transport import P2POp, Transport, all_gather_text, all_reduce_small_
from stretto.errors import ConfigError

_ERROR_PREFIX = "wrong: "


@torch.no_grad()
def broadcast_(tensors: Iterable[Tensor], transport: Transport) -> None:
    """Overwrite ``tensors`` with those of rank 0; all ranks call this together.

    There is one broadcast for each type and device.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype, tensor.device].append(tensor.detach())
    for group in groups.values():
        flat = _flatten_dense_tensors(group)
        # Sent as bytes, so that the back end need not know the type (bool, int64, bf16).
        execute(broadcast(transport.size), flat.view(torch.uint8), transport)
        for tensor, value in zip(group, _unflatten_dense_tensors(flat, group), strict=True):
            tensor.copy_(value)


@torch.no_grad()
def all_reduce_mean_(tensors: list[Tensor], transport: Transport) -> None:
    """Overwrite ``tensors`` with their mean over ranks, summed in float64.

    All ranks call this together.
    """
    if not tensors:
        return
    flat = _flatten_dense_tensors([tensor.detach().double() for tensor in tensors])
    all_reduce_small_(flat, transport)
    flat.div_(transport.size)
    for tensor, value in zip(tensors, _unflatten_dense_tensors(flat, tensors), strict=True):
        tensor.copy_(value)


@torch.no_grad()
def gather_to_rank_0(tensors: Sequence[Tensor], transport: Transport) -> list[list[Tensor]]:
    """Return on rank 0 the ``tensors`` of every rank, by rank; an empty list on other ranks.

    All ranks call this together, with the same types, shapes and kinds of device. Each rank sends
    one message per device: an optimizer may have its step counts on the CPU, its momentum on a GPU.
    """
    tensors_of_ranks: list[dict[int, Tensor]] = [
        {} for _ in range(0 if transport.rank else transport.size)
    ]
    for indices in group_by_device(tensors):
        group = [tensors[index] for index in indices]
        for found, row in zip(
            tensors_of_ranks, _gather_rows(as_bytes(group), transport), strict=True
        ):
            found.update(zip(indices, _from_bytes(row, group), strict=True))
    return [[found[index] for index in range(len(tensors))] for found in tensors_of_ranks]


def group_by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors on each device, devices in order of first occurrence."""
    indices: dict[torch.device, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        indices[tensor.device].append(index)
    return list(indices.values())


def _gather_rows(local_row: Tensor, transport: Transport) -> list[Tensor]:
    """Return on rank 0 the ``local_row`` of every rank, by rank; an empty list elsewhere."""
    if transport.rank:
        transport.exchange([P2POp(0, local_row)], [])
        return []
    rows = [local_row, *(torch.empty_like(local_row) for _ in range(1, transport.size))]
    transport.exchange([], [P2POp(peer, row) for peer, row in enumerate(rows) if peer])
    return rows


def as_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of ``tensors``, concatenated, as a new tensor."""
    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])


def _from_bytes(flat: Tensor, templates: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.nbytes for tensor in templates])
    # Cloned, because a view as a wider type needs an aligned start.
    return [
        part.clone().view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, templates, strict=True)
    ]


def broadcast_text(text: str, transport: Transport) -> str:
    """Return rank 0's ``text`` on every rank; all ranks call this together."""
    data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    length = torch.tensor([len(text.encode())])
    broadcast_([length], transport)
    if transport.rank:
        data = torch.zeros(max(1, int(length)), dtype=torch.uint8)
    broadcast_([data], transport)
    return bytes(data[: int(length)].tolist()).decode()


def compute_on_rank_0(make: Callable[[], str], transport: Transport) -> str:
    """Return the text that ``make`` returns on rank 0, on every rank (collective).

    Raises:
        ConfigError: On all ranks, with the message of the error that rank 0 raised.
    """
    text = ""
    if transport.rank == 0:
        try:
            text = make()
        except ConfigError as wrong:
            text = f"{_ERROR_PREFIX}{wrong}"
    result = all_gather_text(text, transport)[0]
    if result.startswith(_ERROR_PREFIX):
        raise ConfigError(result.removeprefix(_ERROR_PREFIX))
    return result
