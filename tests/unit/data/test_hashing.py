import numpy as np

from stretto.data.hashing import counters, derive_key, mix64, uniforms


def test_key_zero_gives_the_stream_of_splitmix64_with_seed_zero():
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix64(counters(0, 3)).tolist() == expected


def test_counters_can_start_anywhere():
    assert counters(3, 9).tolist() == counters(0, 9)[3:].tolist()


def test_keys_depend_on_every_coordinate_and_on_their_order():
    keys = [derive_key(*c).item() for c in [(0,), (0, 0), (0, 1), (1, 0), (-1, 0), (2**63, 0)]]
    assert len(set(keys)) == len(keys)


def test_uniforms_fill_the_unit_interval_evenly():
    values = uniforms(mix64(counters(0, 10_000)))
    counts = np.histogram(values, bins=10, range=(0, 1))[0]
    assert counts.sum() == 10_000
    assert ((counts - 1000) ** 2 / 1000).sum() < 33.7  # chi square, 9 degrees, once in 10^4
