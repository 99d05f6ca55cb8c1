from fractions import Fraction

import pytest
import torch

from stretto.cluster.world import Mesh
from stretto.comm.algorithms import ALLREDUCE, doubling, native, ring, ring_all_gather
from stretto.comm.codecs import Fp8, parse_wire
from stretto.comm.codecs.bound import roundings
from stretto.comm.codecs.codec import unsent_sums
from stretto.comm.codecs.sparse import SparseSum
from stretto.comm.codecs.topk import largest, num_kept, ranking
from stretto.comm.courier import Courier
from stretto.comm.local import run_local
from stretto.comm.recording import RecordingChannel
from stretto.comm.schedule import rounds
from stretto.errors import ChannelError, CheckpointError, ConfigError, ScheduleError


def encoded(values, chunks, block=4):
    """Encode ``values`` in place; return the wire and what is decoded from it."""
    codec = Fp8(block)
    wire = torch.zeros(codec.num_bytes(chunks), dtype=torch.uint8)
    work = torch.full((codec.num_working(chunks, values.device),), float("nan"))
    codec.lay(values, chunks, wire, work).encode()
    decoded = torch.empty_like(values)
    codec.lay(decoded, chunks, wire, work).decode()
    return wire, decoded


def test_what_leaves_is_rounded_at_home_too():
    values = torch.randn(23)
    before = values.clone()
    _, decoded = encoded(values, [8, 8, 7])
    assert torch.equal(values, decoded)
    assert not torch.equal(values, before)


def test_every_element_goes_to_the_nearest_number_that_eight_bits_can_say():
    values = torch.rand(1 << 12) * 896 - 448
    values[::256] = 448  # the scale is one
    exact = values.clone()
    _, decoded = encoded(values, [len(values)], block=256)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    nearest = (exact[:, None] - numbers).abs().amin(dim=1)
    assert torch.equal((exact - decoded).abs(), nearest)


def test_a_chunk_is_encoded_alike_in_whatever_message_it_travels():
    chunks = [11, 11, 11, 10, 10]
    whole = torch.randn(sum(chunks))
    parts = whole.clone()
    encoded(whole, chunks)
    for part, length in zip(parts.split(chunks), chunks, strict=True):
        encoded(part, [length])
    assert torch.equal(whole, parts)


def test_large_stretches_are_cut_into_tiles_that_change_nothing(monkeypatch):
    whole = torch.randn(3 * 700)
    tiled = whole.clone()
    encoded(whole, [700, 700, 700], block=16)
    monkeypatch.setattr("stretto.comm.codecs.fp8.TILE", 64)
    encoded(tiled, [700, 700, 700], block=16)
    assert torch.equal(whole, tiled)


def test_a_message_takes_a_byte_an_element_and_a_byte_a_block():
    assert Fp8(256).num_bytes([1000]) == 1004
    assert Fp8(256).num_bytes([255, 256, 257, 0]) == 768 + 4


def test_an_encoded_ring_sends_about_a_quarter():
    def work(channel):
        sent = []
        for codec in (None, Fp8()):
            recording = RecordingChannel(channel)
            with Courier(recording) as courier:
                courier.run(courier.prepare(ring(2), torch.ones(4096), codec))
            sent.append(sum(message.num_bytes for message in recording.sent if message.peer >= 0))
        return sent

    for plain, coded in run_local(2, work):
        assert coded / plain < 0.26


def test_the_back_ends_own_sum_cannot_be_encoded():
    def work(channel):
        Courier(channel).prepare(native(2), torch.ones(4), Fp8())

    with pytest.raises(ScheduleError, match="native is carried out by the back end"):
        run_local(2, work)


def test_only_float32_is_encoded():
    def work(channel):
        Courier(channel).prepare(ring(1), torch.ones(4, dtype=torch.float64), Fp8())

    with pytest.raises(ScheduleError, match=r"float32, not torch.float64"):
        run_local(1, work)


def test_ranks_that_encode_differently_are_told():
    def work(channel):
        with Courier(channel) as courier:
            courier.run(courier.prepare(ring(2), torch.ones(4), Fp8() if channel.rank else None))

    with pytest.raises(ChannelError, match="fp8 in blocks of 256"):
        run_local(2, work)


def test_encoding_and_decoding_again_allocates_nothing():
    values, codec = torch.randn(5000), Fp8()
    wire = torch.zeros(codec.num_bytes([5000]), dtype=torch.uint8)
    laid = codec.lay(values, [5000], wire, torch.empty(codec.num_working([5000], values.device)))
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        laid.encode()
        laid.decode()
    # Numbers among the arguments are tensors of a few bytes to the framework.
    assert sum(max(0, e.self_cpu_memory_usage) for e in profile.function_events) < 200


def test_any_nan_stays_one_and_leads_to_the_same_bytes_again():
    values = torch.randn(12)
    values.view(torch.int32)[[1, 6]] = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32)
    first, _ = encoded(values, [12])
    assert values.isnan().nonzero().flatten().tolist() == [1, 6]
    again, _ = encoded(values, [12])
    assert torch.equal(first, again)


def test_sums_that_nobody_is_sent_are_known():
    assert unsent_sums(rounds(doubling(4), 0), 1) == [[], [(0, 1)]]
    assert not any(unsent_sums(rounds(ring(4), 0), 4))


@pytest.mark.parametrize(
    ("name", "hosts", "count"),
    [("ring", (5,), 5), ("doubling", (8,), 4), ("doubling", (6,), 4), ("hierarchical", (3, 3), 4)],
)
def test_roundings_on_the_longest_way_are_counted(name, hosts, count):
    assert roundings(ALLREDUCE[name](Mesh(hosts), 1)) == count
    assert roundings(ALLREDUCE[name](Mesh(hosts), 2)) == count


def chosen(values, num):
    n = values.numel()
    return largest(values, num, ranking(n), torch.empty(n, dtype=torch.int64)).tolist()


def test_of_equal_magnitudes_the_first_are_taken():
    assert chosen(torch.tensor([1.0, -2.0, 2.0, 0.5, 2.0, -2.0]), 3) == [1, 2, 4]
    assert chosen(torch.zeros(9), 4) == [0, 1, 2, 3]
    assert chosen(torch.ones(1 << 16), 100) == list(range(100))


def test_what_is_not_finite_is_taken_first():
    values = torch.tensor([3.0, float("-inf"), 9.0, float("nan"), 1.0])
    assert chosen(values, 1) == [3]
    assert chosen(values, 2) == [1, 3]


@pytest.mark.parametrize("num", [0, 1, 500, 2000])
def test_the_largest_are_those_of_a_stable_sort(num):
    values = torch.randint(-50, 50, (2000,)).float()
    order = torch.argsort(values.abs(), descending=True, stable=True)
    assert chosen(values, num) == order[:num].sort().values.tolist()


def test_a_share_is_rounded_up_exactly():
    assert num_kept(100, Fraction(7, 100)) == 7
    assert num_kept(101, Fraction(7, 100)) == 8
    assert num_kept(3, Fraction(1, 1000)) == 1
    assert num_kept(0, Fraction(1, 2)) == 0


def sparse_of(channel, courier, flat, share=Fraction(1, 4)):
    return SparseSum(courier, ring_all_gather(channel.size), channel.rank, flat, share)


def test_what_was_left_is_sent_later():
    def work(channel):
        flat, sums = torch.zeros(4), torch.zeros(4)
        with Courier(channel) as courier:
            sparse = sparse_of(channel, courier, flat)
            for gradient in ([4.0, 3, 2, 1], [0.0] * 4, [0.0] * 4, [0.0] * 4):
                flat.copy_(torch.tensor(gradient))
                sparse.start().wait()
                assert flat.count_nonzero() == 1
                sums += flat
        return sums.tolist()

    assert run_local(2, work) == [[8, 6, 4, 2]] * 2


def test_going_on_from_a_saved_residual_equals_never_having_stopped():
    gradients = torch.randn(5, 2, 64)

    def work(channel, stop):
        flat = torch.empty(64)
        with Courier(channel) as courier:
            sparse = sparse_of(channel, courier, flat)
            for step in range(5):
                if step == stop:
                    state, sparse = sparse.state_dict(), sparse_of(channel, courier, flat)
                    sparse.load_state_dict(state)
                flat.copy_(gradients[step, channel.rank])
                sparse.start().wait()
        return flat.tolist()

    assert run_local(2, lambda c: work(c, 3)) == run_local(2, lambda c: work(c, None))


def test_a_residual_of_another_size_is_refused():
    def work(channel):
        with Courier(channel) as courier:
            sparse = sparse_of(channel, courier, torch.zeros(4))
            sparse.load_state_dict({"residual": torch.zeros(5)})

    with pytest.raises(CheckpointError, match="5 elements, the gradients have 4"):
        run_local(1, work)


def test_waiting_twice_is_waiting_once():
    def work(channel):
        flat = torch.ones(4)
        with Courier(channel) as courier:
            pending = sparse_of(channel, courier, flat).start()
            pending.wait()
            flat.mul_(10)
            pending.wait()
            return flat.tolist(), pending.finished_s is not None

    assert run_local(2, work) == [([20, 0, 0, 0], True)] * 2


@pytest.mark.parametrize("text", ["own", "fp32", "bf16", "fp16"])
def test_plain_wires_are_types_and_nothing_else(text):
    wire = parse_wire(text)
    assert wire.codec is None
    assert wire.share is None


def test_other_wires_hold_float32():
    assert parse_wire("fp8").codec == Fp8()
    assert parse_wire("fp8").dtype is torch.float32
    assert parse_wire("topk 0.1%").share == Fraction(1, 1000)
    assert parse_wire("topk 0.1%").dtype is torch.float32


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fp9", 'no wire .fp9.; did you mean "fp8"'),
        ("fp8 1%", "no wire .fp8 1%."),
        ("topk", "topk 1%"),
        ("topk 5", "topk 1%"),
        ("topk 0%", "above 0%"),
        ("topk 101%", "at most 100%"),
        ("topk many%", "topk 1%"),
        ("topk 1/0%", "topk 1%"),
    ],
)
def test_a_wire_that_cannot_be_is_refused_in_words(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_wire(text)
