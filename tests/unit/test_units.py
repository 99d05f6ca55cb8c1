import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from stretto.errors import ConfigError
from stretto.units import (
    Bytes,
    format_bytes,
    format_s,
    parse_bits_per_s,
    parse_bytes,
    parse_fraction,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2MB", 2_000_000),
        ("2MiB", 2_097_152),
        ("512 KiB", 524_288),
        (" 1.5kb ", 1500),
        (".5gb", 500_000_000),
        ("1GiB", 2**30),
        ("7b", 7),
        ("7", 7),
        (7, 7),
        (0, 0),
    ],
)
def test_a_size_is_a_number_of_bytes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MB", "2XB", "2mbit", "-1", "1e3", "1.2.3MB", "2 M B", True])
def test_an_invalid_size_is_refused_with_the_text_and_an_example(text):
    with pytest.raises(ConfigError, match='expected a size such as "2MB"') as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [("400mbit", 400_000_000), ("10Gbit", 10**10), ("2.5kbit", 2500), ("9bit", 9), (9, 9)],
)
def test_a_rate_is_a_number_of_bits_a_second(text, bits_per_s):
    assert parse_bits_per_s(text) == bits_per_s


def test_a_size_is_not_accepted_as_a_rate():
    with pytest.raises(ConfigError, match='expected a rate such as "400mbit"'):
        parse_bits_per_s("400MB")


@pytest.mark.parametrize(
    ("text", "fraction"), [("0.1%", 0.001), ("0.001", 0.001), ("0", 0), (" 5% ", 0.05)]
)
def test_a_fraction_may_be_written_in_percent(text, fraction):
    assert parse_fraction(text) == pytest.approx(fraction)


@pytest.mark.parametrize("text", ["", "%", "1", "100%", "-0.1", "nan", "inf", "half"])
def test_an_invalid_fraction_is_refused(text):
    with pytest.raises(ConfigError, match="expected a fraction"):
        parse_fraction(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (25_000_000, "25 MB"), (6.5e9, "6.5 GB")],
)
def test_a_size_is_shown_in_its_largest_unit(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0007, "0.7 ms"),
        (1.25, "1.25 s"),
        (59, "59 s"),
        (200, "3 min 20 s"),
        (3599.9, "1 h 00 min"),
        (7260, "2 h 01 min"),
    ],
)
def test_a_duration_is_shown_in_readable_units(seconds, text):
    assert format_s(seconds) == text


@given(st.integers(0, 2**53))
def test_a_bare_number_of_bytes_is_itself(num_bytes):
    assert parse_bytes(num_bytes) == parse_bytes(str(num_bytes)) == num_bytes


@pytest.mark.parametrize(("value", "num_bytes"), [("2KB", 2000), (5, 5)])
def test_a_bytes_field_takes_text_and_numbers(value, num_bytes):
    assert TypeAdapter(Bytes).validate_python(value, strict=True) == num_bytes


@pytest.mark.parametrize("value", ["2XB", 2.5, None, [1], True])
def test_a_bytes_field_refuses_the_rest(value):
    with pytest.raises(ValidationError, match="expected a size"):
        TypeAdapter(Bytes).validate_python(value, strict=True)
