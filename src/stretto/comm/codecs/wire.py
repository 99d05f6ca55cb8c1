"""What gradients travel as, written as people say it: ``"bf16"``, ``"fp8"``, ``"topk 1%"``."""

from dataclasses import dataclass
from fractions import Fraction

import torch

from stretto.comm.buckets import WIRE
from stretto.comm.codecs.codec import Codec
from stretto.comm.codecs.fp8 import Fp8
from stretto.config.text import suggestion
from stretto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Wire:
    """One way to travel; at most one of ``codec`` and ``share`` is set."""

    text: str
    dtype: torch.dtype | None
    """The type of the bucket's flat tensor; None is the gradients' own."""
    codec: Codec | None = None
    """Encodes before every send: for `Courier.prepare`. Not with the back end's own all-reduce."""
    share: Fraction | None = None
    """The share of entries that a rank sends: for `SparseSum`. No all-reduce schedule at all."""


def parse_wire(text: str) -> Wire:
    """Read a wire; raise `ConfigError` saying what is wrong and what is nearest."""
    name, _, rest = text.strip().partition(" ")
    if name == "topk":
        return Wire(text.strip(), torch.float32, share=_share(text, rest.strip()))
    known = (*WIRE, "fp8", "topk 1%")
    if rest or name not in known:
        raise ConfigError(f"no wire {text!r}{suggestion(text, known, 'known')}")
    return Wire(name, torch.float32, Fp8()) if name == "fp8" else Wire(name, WIRE[name])


def _share(text: str, percent: str) -> Fraction:
    try:
        share = Fraction(percent.removesuffix("%").strip()) / 100
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not percent.endswith("%") or not 0 < share <= 1:
        raise ConfigError(
            f'wire {text!r}: write the share of entries to send as "topk 1%", above 0% and at '
            "most 100%"
        )
    return share
