import hashlib
import pickle
import sys

import cbor2
import pytest
import xxhash as xxhash_library

from vllm.utils import hashing

VALUE = (b"parent", (1, 2, 3), None)


def test_sha256_hashes_the_highest_pickle_protocol():
    assert hashing.sha256(VALUE) == hashlib.sha256(pickle.dumps(VALUE, pickle.HIGHEST_PROTOCOL)).digest()


def test_sha256_cbor_hashes_canonical_cbor():
    assert (
        hashing.sha256_cbor({"b": 1, "a": 2})
        == hashlib.sha256(cbor2.dumps({"a": 2, "b": 1}, canonical=True)).digest()
    )


def test_xxhash_kinds_are_128_bit():
    assert hashing.xxhash(VALUE) == xxhash_library.xxh3_128_digest(
        pickle.dumps(VALUE, pickle.HIGHEST_PROTOCOL)
    )
    assert len(hashing.xxhash_cbor(VALUE)) == 16


@pytest.mark.parametrize("name", hashing.HASH_ALGORITHMS)
def test_every_listed_name_resolves_to_a_function_of_bytes(name):
    assert isinstance(hashing.get_hash_fn_by_name(name)(VALUE), bytes)


def test_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'md5'.*sha256_cbor"):
        hashing.get_hash_fn_by_name("md5")


def test_missing_xxhash_is_reported_when_chosen(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ModuleNotFoundError, match="need the package xxhash"):
        hashing.get_hash_fn_by_name("xxhash_cbor")
