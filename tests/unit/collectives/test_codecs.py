"""The FP8 codec, top-k sparse sums, and the parsing of wire formats."""

from fractions import Fraction

import pytest
import torch

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms import ALLREDUCE, doubling, native, ring, ring_all_gather
from stretto.collectives.codec_error_bound import max_roundings
from stretto.collectives.codecs import Fp8, parse_wire, unsent_sums
from stretto.collectives.schedule import rounds
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.in_process_transports import RecordingTransport, run_threads
from stretto.comm.topk_all_reduce import TopKAllReduce, largest_indices, num_kept, tie_break_keys
from stretto.errors import CheckpointError, ConfigError, ScheduleError, TransportError


def encoded(values, chunks, block=4):
    """Encode ``values`` in place; return the wire buffer and its decoded values."""
    codec = Fp8(block)
    wire = torch.zeros(codec.num_bytes(chunks), dtype=torch.uint8)
    work = torch.full((codec.workspace_numel(chunks, values.device),), float("nan"))
    codec.bind(values, chunks, wire, work).encode()
    decoded = torch.empty_like(values)
    codec.bind(decoded, chunks, wire, work).decode()
    return wire, decoded


def test_encoding_also_rounds_the_senders_values():
    values = torch.randn(23)
    before = values.clone()
    _, decoded = encoded(values, [8, 8, 7])
    assert torch.equal(values, decoded)
    assert not torch.equal(values, before)


def test_every_element_is_rounded_to_the_nearest_fp8_number():
    values = torch.rand(1 << 12) * 896 - 448
    values[::256] = 448  # the scale is one
    exact = values.clone()
    _, decoded = encoded(values, [len(values)], block=256)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    nearest = (exact[:, None] - numbers).abs().amin(dim=1)
    assert torch.equal((exact - decoded).abs(), nearest)


def test_the_encoding_of_a_chunk_does_not_depend_on_its_message():
    chunks = [11, 11, 11, 10, 10]
    whole = torch.randn(sum(chunks))
    parts = whole.clone()
    encoded(whole, chunks)
    for part, length in zip(parts.split(chunks), chunks, strict=True):
        encoded(part, [length])
    assert torch.equal(whole, parts)


def test_cutting_a_message_into_tiles_changes_nothing(monkeypatch):
    whole = torch.randn(3 * 700)
    tiled = whole.clone()
    encoded(whole, [700, 700, 700], block=16)
    monkeypatch.setattr("stretto.collectives.codecs.TILE", 64)
    encoded(tiled, [700, 700, 700], block=16)
    assert torch.equal(whole, tiled)


def test_a_message_takes_a_byte_an_element_and_a_byte_a_block():
    assert Fp8(256).num_bytes([1000]) == 1004
    assert Fp8(256).num_bytes([255, 256, 257, 0]) == 768 + 4


def test_an_encoded_ring_sends_about_a_quarter():
    def work(transport):
        sent = []
        for codec in (None, Fp8()):
            recording = RecordingTransport(transport)
            with CollectiveExecutor(recording) as executor:
                executor.run(executor.prepare(ring(2), torch.ones(4096), codec))
            sent.append(sum(message.num_bytes for message in recording.sent if message.peer >= 0))
        return sent

    for plain, coded in run_threads(2, work):
        assert coded / plain < 0.26


def test_the_back_ends_own_sum_cannot_be_encoded():
    def work(transport):
        CollectiveExecutor(transport).prepare(native(2), torch.ones(4), Fp8())

    with pytest.raises(ScheduleError, match="native is run by the back end"):
        run_threads(2, work)


def test_only_float32_is_encoded():
    def work(transport):
        CollectiveExecutor(transport).prepare(ring(1), torch.ones(4, dtype=torch.float64), Fp8())

    with pytest.raises(ScheduleError, match=r"float32, not torch.float64"):
        run_threads(1, work)


def test_ranks_that_encode_differently_get_an_error():
    def work(transport):
        with CollectiveExecutor(transport) as executor:
            executor.run(
                executor.prepare(ring(2), torch.ones(4), Fp8() if transport.rank else None)
            )

    with pytest.raises(TransportError, match="fp8 in blocks of 256"):
        run_threads(2, work)


def test_encoding_and_decoding_again_allocates_nothing():
    values, codec = torch.randn(5000), Fp8()
    wire = torch.zeros(codec.num_bytes([5000]), dtype=torch.uint8)
    bound = codec.bind(
        values, [5000], wire, torch.empty(codec.workspace_numel([5000], values.device))
    )

    def encode_and_decode():
        bound.encode()
        bound.decode()

    # PyTorch makes tensors of a few bytes of the numbers among the arguments.
    assert allocated_bytes(encode_and_decode) < 200
    assert allocated_bytes(lambda: (encode_and_decode(), torch.empty(1000))) > 4000


def allocated_bytes(work):
    """Return the bytes that PyTorch allocates during ``work``."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    return sum(max(0, e.self_cpu_memory_usage) for e in profile.function_events)


def test_nan_stays_nan_and_encodes_to_the_same_bytes_again():
    values = torch.randn(12)
    values.view(torch.int32)[[1, 6]] = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32)
    first, _ = encoded(values, [12])
    assert values.isnan().nonzero().flatten().tolist() == [1, 6]
    again, _ = encoded(values, [12])
    assert torch.equal(first, again)


def test_unsent_sums_are_found():
    assert unsent_sums(rounds(doubling(4), 0), 1) == [[], [(0, 1)]]
    assert not any(unsent_sums(rounds(ring(4), 0), 4))


@pytest.mark.parametrize(
    ("name", "hosts", "count"),
    [("ring", (5,), 5), ("doubling", (8,), 4), ("doubling", (6,), 4), ("hierarchical", (3, 3), 4)],
)
def test_the_largest_number_of_roundings_is_counted(name, hosts, count):
    assert max_roundings(ALLREDUCE[name](Mesh(hosts), 1)) == count
    assert max_roundings(ALLREDUCE[name](Mesh(hosts), 2)) == count


def chosen(values, num):
    n = values.numel()
    return largest_indices(
        values, num, tie_break_keys(n), torch.empty(n, dtype=torch.int64)
    ).tolist()


def test_of_equal_magnitudes_the_first_are_taken():
    assert chosen(torch.tensor([1.0, -2.0, 2.0, 0.5, 2.0, -2.0]), 3) == [1, 2, 4]
    assert chosen(torch.zeros(9), 4) == [0, 1, 2, 3]
    assert chosen(torch.ones(1 << 16), 100) == list(range(100))


def test_values_that_are_not_finite_are_taken_first():
    values = torch.tensor([3.0, float("-inf"), 9.0, float("nan"), 1.0])
    assert chosen(values, 1) == [3]
    assert chosen(values, 2) == [1, 3]


@pytest.mark.parametrize("num", [0, 1, 500, 2000])
def test_the_largest_entries_are_those_of_a_stable_sort(num):
    values = torch.randint(-50, 50, (2000,)).float()
    order = torch.argsort(values.abs(), descending=True, stable=True)
    assert chosen(values, num) == order[:num].sort().values.tolist()


def test_the_number_of_kept_entries_is_rounded_up_exactly():
    assert num_kept(100, Fraction(7, 100)) == 7
    assert num_kept(101, Fraction(7, 100)) == 8
    assert num_kept(3, Fraction(1, 1000)) == 1
    assert num_kept(0, Fraction(1, 2)) == 0


def sparse_of(transport, executor, flat, kept_fraction=Fraction(1, 4)):
    return TopKAllReduce(
        executor, ring_all_gather(transport.size), transport.rank, flat, kept_fraction
    )


def test_the_residual_is_sent_later():
    def work(transport):
        flat, sums = torch.zeros(4), torch.zeros(4)
        with CollectiveExecutor(transport) as executor:
            sparse = sparse_of(transport, executor, flat)
            for gradient in ([4.0, 3, 2, 1], [0.0] * 4, [0.0] * 4, [0.0] * 4):
                flat.copy_(torch.tensor(gradient))
                sparse.start().wait()
                assert flat.count_nonzero() == 1
                sums += flat
        return sums.tolist()

    assert run_threads(2, work) == [[8, 6, 4, 2]] * 2


def test_resuming_from_a_saved_residual_equals_an_uninterrupted_run():
    gradients = torch.randn(5, 2, 64)

    def work(transport, stop):
        flat = torch.empty(64)
        with CollectiveExecutor(transport) as executor:
            sparse = sparse_of(transport, executor, flat)
            for step in range(5):
                if step == stop:
                    state, sparse = sparse.state_dict(), sparse_of(transport, executor, flat)
                    sparse.load_state_dict(state)
                flat.copy_(gradients[step, transport.rank])
                sparse.start().wait()
        return flat.tolist()

    assert run_threads(2, lambda c: work(c, 3)) == run_threads(2, lambda c: work(c, None))


def test_a_residual_of_another_size_is_refused():
    def work(transport):
        with CollectiveExecutor(transport) as executor:
            sparse = sparse_of(transport, executor, torch.zeros(4))
            sparse.load_state_dict({"residual": torch.zeros(5)})

    with pytest.raises(CheckpointError, match="5 elements, the gradients have 4"):
        run_threads(1, work)


def test_waiting_twice_is_waiting_once():
    def work(transport):
        flat = torch.ones(4)
        with CollectiveExecutor(transport) as executor:
            handle = sparse_of(transport, executor, flat).start()
            handle.wait()
            flat.mul_(10)
            handle.wait()
            return flat.tolist(), handle.finished_s is not None

    assert run_threads(2, work) == [([20, 0, 0, 0], True)] * 2


@pytest.mark.parametrize("text", ["own", "fp32", "bf16", "fp16"])
def test_plain_wires_have_neither_a_codec_nor_a_kept_fraction(text):
    wire = parse_wire(text)
    assert wire.codec is None
    assert wire.kept_fraction is None


def test_other_wires_use_float32_buckets():
    assert parse_wire("fp8").codec == Fp8()
    assert parse_wire("fp8").dtype is torch.float32
    assert parse_wire("topk 0.1%").kept_fraction == Fraction(1, 1000)
    assert parse_wire("topk 0.1%").dtype is torch.float32


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_an_invalid_wire_is_refused_with_advice(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_wire(text)
