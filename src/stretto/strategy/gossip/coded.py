"""What parameters travel as; in eight bits, differences to what all ranks last had in common.

With x a rank's values, r that reference and e what earlier rounds left of them,

    d = (x - r) + e        q = Q(d) travels        e becomes d - q

and both ends combine what was *decoded*: x moves by weight (q of the other - q of its own). The
reference is the same everywhere and drops out of the difference, and what one rank gains another
loses: no mean moves. What Q does to one round the next one mends: over many rounds the errors of
what a rank says add up to no more than one e (error feedback; Seide et al., 2014,
doi:10.21437/Interspeech.2014-274).

An error is a share of x - r: the reference grows old, and an exact average makes a new one.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from stretto.comm.buckets import WIRE
from stretto.comm.codecs import Codec, Fp8, Laid
from stretto.comm.errand import Scratch
from stretto.optim.combining import pull_
from stretto.strategy.gossip.mixer import Differences, Round, Whom, check_kept
from stretto.strategy.gossip.route import Route
from stretto.topology import Peers

CODECS: dict[str, Codec] = {"fp8": Fp8()}
"""What differences to a reference may be written as."""
_STEPS = 0
"""The scratch of whoever makes steps: lanes of rounds count from 1."""


def checked_wire(word: str) -> str:
    """Return what parameters may travel as.

    Raises:
        ValueError: They may not.
    """
    known = (*WIRE, *CODECS)
    if word not in known:
        raise ValueError(f"expected {', '.join(known)}, got {word!r}")
    return word


def differences(
    wire: str, parameters: Sequence[nn.Parameter], whom: Whom, route: Route, scratch: Scratch
) -> Differences:
    """Return the gossip of a segment whose parameters travel as ``wire`` says.

    ``scratch`` is where segments, one at a time on a lane, write and read a codec's bytes.
    """
    if wire in CODECS:
        return CodedDifferences(parameters, CODECS[wire], whom, route, scratch)
    return Differences(parameters, WIRE[wire], whom, route)


class CodedDifferences(Differences):
    """Says how far it is from the reference, in a codec's bytes, and remembers what those left out.

    For each element of its shard a rank keeps the reference and what is left, in the parameters'
    own type but no less than 32 bits; every round under way takes the codec's bytes for what is
    sent and for each that is heard. Scratch has room for the largest shard: what is encoded, what
    all have decoded.

    Note: who decodes. A group's rounds are put together on the thread of their lane, while the
    thread that makes steps encodes: each lane decodes in scratch of its own.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        codec: Codec,
        whom: Whom,
        route: Route,
        scratch: Scratch,
    ) -> None:
        super().__init__(parameters, torch.uint8, whom, route)
        self._travels = codec.num_bytes([self._mine])
        self._codec, self._scratch = codec, scratch
        self._decodes_on = route.lane if route.group.width > 1 else _STEPS
        kept = torch.promote_types(self._like.dtype, torch.float32)
        self._reference = self._like.new_empty(self._mine, dtype=kept)
        self._left = torch.zeros_like(self._reference)
        self._float32 = self._like.new_empty(0, dtype=torch.float32)
        self._longest = max(shard.stop - shard.start for shard in route.group.shards(self._numel))
        self._refer()

    def begin_again(self, values: list[Tensor]) -> None:
        """Make the new values the reference; nothing is left of the old one."""
        super().begin_again(values)
        self._refer()

    def state(self) -> dict[str, Tensor]:
        """Return the reference and what is left, too; of one length on all members of a group."""
        kept = {"reference": self._reference, "residual": self._left}
        short = self._longest - self._mine
        return super().state() | {name: pad(flat, (0, short)) for name, flat in kept.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take them back; where there are none the values are the reference, equal everywhere.

        They still are those of the one model that a checkpoint has.
        """
        super().load(state)
        self._refer()
        for name, into in (("reference", self._reference), ("residual", self._left)):
            if name in state:
                check_kept(name, state[name], self._longest)
                into.copy_(state[name][: self._mine])

    def _refer(self) -> None:
        self._written(self._reference)
        self._left.zero_()

    def _said(self, peers: Peers) -> list[Tensor]:
        said = self._room()
        (moved,) = self._scratch.cut(_STEPS, [self._mine], self._reference, "moved")
        self._left.add_(self._written(moved).sub_(self._reference))
        place, laid = self._lay(said, _STEPS)
        place.copy_(self._left)
        laid.encode()
        self._left.sub_(place)  # now what the other end will decode
        return [said]

    def _add_up(self, one: Round, change: Tensor) -> None:
        if not one.heard:
            return  # nobody asked the lane, which may decode for another segment
        flats = [*one.sent, *one.heard]
        sent, *heard = self._scratch.cut(
            self._decodes_on, [self._mine] * len(flats), change, "decoded"
        )
        for into, flat in zip((sent, *heard), flats, strict=True):
            place, laid = self._lay(flat, self._decodes_on)
            laid.decode()
            into.copy_(place)
        pull_(change, sent, heard, [edge.weight for edge in one.peers.receives])

    def _lay(self, said: Tensor, lane: int) -> tuple[Tensor, Laid]:
        """Return where ``said`` is written from or read to, and how."""
        (place,) = self._scratch.cut(lane, [self._mine], self._float32, "place")
        working = self._codec.num_working([self._mine], place.device)
        (work,) = self._scratch.cut(lane, [working], self._float32, "work")
        return place, self._codec.lay(place, [self._mine], said, work)
