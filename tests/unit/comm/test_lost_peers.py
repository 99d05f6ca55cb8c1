"""What a lost peer is told as; real losses are in tests/multi/test_groups.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.cluster.world import Mesh
from stretto.comm.channel import Parcel
from stretto.comm.gloo import GlooChannel, in_plain_words
from stretto.errors import ChannelError

SOURCE = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]"
WISHES = "This is typically caused by a remote worker crashing. Check its logs. GLHF! \U0001f3d6"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            f"{SOURCE} Connection closed by peer [127.0.0.1]:21127. {WISHES}",
            "connection closed by peer 127.0.0.1:21127",
        ),
        (
            f"{SOURCE} Read error [127.0.0.1]:65250: Connection reset by peer. {WISHES}",
            "read error 127.0.0.1:65250: Connection reset by peer",
        ),
        (
            f"{SOURCE} Connection closed by peer [fe80::1]:21127. {WISHES}",
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
def test_of_gloo_s_text_what_helps_is_left(text, words):
    assert in_plain_words(text) == words


@given(st.text())
def test_whatever_the_back_end_says_becomes_one_printable_line_of_ascii(text):
    words = in_plain_words(text)
    assert words
    assert words.isascii()
    assert words.isprintable()


class Broken:
    """Stands for a group whose every message fails; members 0 and 1 of it are ranks 3 and 5."""

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
    ("text", "told"),
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
def test_a_lost_peer_is_named_by_its_rank_and_with_what_it_has_probably_met(text, told):
    with pytest.raises(ChannelError) as caught:
        GlooChannel(lambda _lane: Broken(text), [3, 5], Mesh((2,))).exchange([Parcel(1, None)], [])
    assert str(caught.value) == f"rank 3 lost rank 5: {told}"


def test_in_the_back_end_s_own_sum_nobody_knows_which_peer_was_lost():
    with pytest.raises(ChannelError, match=r"^rank 3 lost a peer: broken pipe; it was killed"):
        GlooChannel(lambda _lane: Broken("Broken pipe"), [3, 5], Mesh((2,))).start_all_reduce(None)
