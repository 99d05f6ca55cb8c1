"""Error messages about a lost peer; real losses are tested in tests/multi/test_groups.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.cluster.world import Mesh
from stretto.comm.gloo import GlooTransport, clean_backend_message
from stretto.comm.transport import P2POp
from stretto.errors import TransportError

SOURCE = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]"
ADVICE = "This is typically caused by a remote worker crashing. Check its logs. GLHF! \U0001f3d6"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"{SOURCE} Connection closed by peer [127.0.0.1]:21127. {ADVICE}",
            "connection closed by peer 127.0.0.1:21127",
        ),
        (
            f"{SOURCE} Read error [127.0.0.1]:65250: Connection reset by peer. {ADVICE}",
            "read error 127.0.0.1:65250: Connection reset by peer",
        ),
        (
            f"{SOURCE} Connection closed by peer [fe80::1]:21127. {ADVICE}",
            "connection closed by peer [fe80::1]:21127",
        ),
        (
            f"{SOURCE} Timed out waiting 90000ms for recv operation to complete",
            "timed out after 1 min 30 s",
        ),
        (
            f"Gloo connectFullMesh failed with {SOURCE} no way",
            "gloo connectFullMesh failed with no way",
        ),
        (
            "Application timeout caused pair closure\nException raised from",
            "application timeout caused pair closure",
        ),
        ("no way to [10.0.0.1:80] from here", "no way to [10.0.0.1:80] from here"),
        ("", "the back end gave no reason"),
    ],
)
def test_the_helpful_part_of_a_gloo_message_is_kept(text, expected):
    assert clean_backend_message(text) == expected


@given(st.text())
def test_every_back_end_message_becomes_one_printable_line_of_ascii(text):
    message = clean_backend_message(text)
    assert message
    assert message.isascii()
    assert message.isprintable()


class Broken:
    """A process group whose every message fails; its members 0 and 1 are ranks 3 and 5."""

    def __init__(self, text):
        self._text = text

    def rank(self):
        return 0

    def send(self, *_):
        raise RuntimeError(self._text)

    def allreduce(self, *_):
        raise RuntimeError(self._text)


KILLED = "it was killed, ran out of memory, or its host is gone"
HANGS = "it hangs, or its host is gone"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Connection closed by peer [::1]:9.", f"connection closed by peer [::1]:9; {KILLED}"),
        ("Timed out waiting 2000ms for recv", f"timed out after 2 s; {HANGS}"),
        (
            "Read error [10.0.0.1]:9: Connection reset by peer. This is typically caused",
            f"read error 10.0.0.1:9: Connection reset by peer; {KILLED}",
        ),
        ("Application timeout", f"application timeout; {HANGS}"),
        ("writev [10.0.0.1]:9: Broken pipe", f"writev 10.0.0.1:9: Broken pipe; {KILLED}"),
        ("Invalid tensor", "invalid tensor"),
    ],
)
def test_a_lost_peer_is_named_by_its_rank_and_the_probable_cause(text, expected):
    with pytest.raises(TransportError) as caught:
        GlooTransport(lambda _lane: Broken(text), [3, 5], Mesh((2,))).exchange([P2POp(1, None)], [])
    assert str(caught.value) == f"rank 3 lost rank 5: {expected}"


def test_in_the_back_ends_own_sum_the_lost_peer_is_unknown():
    with pytest.raises(TransportError, match=r"^rank 3 lost a peer: broken pipe; it was killed"):
        GlooTransport(lambda _lane: Broken("Broken pipe"), [3, 5], Mesh((2,))).start_all_reduce(
            None
        )
