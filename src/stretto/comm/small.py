"""Small sums by the back end itself: counts, texts, and a place to meet."""

import torch
from torch import Tensor

from stretto.comm.channel import Channel


def add_up_(tensor: Tensor, channel: Channel) -> None:
    """Overwrite ``tensor`` with its sum over ranks; all ranks together, equal sizes."""
    channel.start_all_reduce(tensor.view(-1)).wait()


def gather_text(text: str, channel: Channel) -> list[str]:
    """Return every rank's ``text``, in the order of ranks, on every rank; all ranks together."""
    data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    lengths = torch.zeros(channel.size, dtype=torch.float64)
    lengths[channel.rank] = len(text.encode())
    add_up_(lengths, channel)
    ends = torch.cumsum(lengths.long(), 0).tolist()
    starts = [0, *ends[:-1]]
    # Each rank fills its own part of one long text; the sum puts the parts together.
    whole = torch.zeros(max(1, ends[-1]), dtype=torch.float32)
    mine = slice(starts[channel.rank], ends[channel.rank])
    whole[mine] = data[: mine.stop - mine.start].float()
    add_up_(whole, channel)
    letters = bytes(whole.to(torch.uint8).tolist())
    return [letters[start:end].decode() for start, end in zip(starts, ends, strict=True)]


def meet_all(channel: Channel) -> None:
    """Return once every rank has called this."""
    add_up_(torch.zeros(1), channel)
