import argparse

import pytest

from vllm.utils.human_numbers import human_readable_int, loads_json, parse_scalar


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", 7),
        ("-1", -1),
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25600),
        ("2m", 2_000_000),
        ("1M", 2**20),
        ("1g", 10**9),
        ("3G", 3 * 2**30),
        ("1t", 10**12),
        ("1T", 2**40),
    ],
)
def test_suffixes(text, expected):
    assert human_readable_int(text) == expected


@pytest.mark.parametrize("text", ["25.6K", "1.5", "1.0001k", "k", "1kb", "", "0x10", "1 k"])
def test_bad_numbers_are_usage_errors(text):
    with pytest.raises(argparse.ArgumentTypeError):
        human_readable_int(text)


def test_suffixes_inside_json_only_outside_of_strings():
    assert loads_json('{"cpu_bytes_to_use": 2G, "name": "x 1k \\" 2G", "l": [1k, 1.5, -3]}') == {
        "cpu_bytes_to_use": 2 * 2**30,
        "name": 'x 1k " 2G',
        "l": [1000, 1.5, -3],
    }
    with pytest.raises(ValueError, match="fraction"):
        loads_json('{"a": 1.5G}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [("true", True), ("1.5", 1.5), ("2k", 2000), ("kv_both", "kv_both"), ("[1,2]", [1, 2]), ("null", None)],
)
def test_dotted_values(text, expected):
    assert parse_scalar(text) == expected
