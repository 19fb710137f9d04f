"""Content hash functions by their public names. Each maps a picklable or CBOR-able object to bytes. Layer: L0.

`cbor2` and `xxhash` are loaded on first use, so that the default (`sha256`) needs the standard library only.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable

HashFn = Callable[[object], bytes]


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _canonical_cbor(value: object) -> bytes:
    import cbor2

    encoded: bytes = cbor2.dumps(value, canonical=True)
    return encoded


def _xxh3_128(data: bytes) -> bytes:
    try:
        import xxhash
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "The hash algorithms 'xxhash' and 'xxhash_cbor' need the package xxhash"
        ) from error
    digest: bytes = xxhash.xxh3_128_digest(data)
    return digest


def sha256(value: object) -> bytes:
    """SHA-256 of the pickled value: fast, stable within one Python version."""
    return hashlib.sha256(_pickled(value)).digest()


def sha256_cbor(value: object) -> bytes:
    """SHA-256 of the value in canonical CBOR: reproducible in other languages and Python versions."""
    return hashlib.sha256(_canonical_cbor(value)).digest()


def xxhash(value: object) -> bytes:
    """128-bit xxh3 of the pickled value: fastest, not collision resistant against an attacker."""
    return _xxh3_128(_pickled(value))


def xxhash_cbor(value: object) -> bytes:
    """128-bit xxh3 of the value in canonical CBOR."""
    return _xxh3_128(_canonical_cbor(value))


_HASH_FUNCTIONS: dict[str, HashFn] = {
    "sha256": sha256,
    "sha256_cbor": sha256_cbor,
    "xxhash": xxhash,
    "xxhash_cbor": xxhash_cbor,
}
HASH_ALGORITHMS = tuple(_HASH_FUNCTIONS)


def get_hash_fn_by_name(name: str) -> HashFn:
    """The hash function called `name`.

    Raises ValueError for an unknown name and ModuleNotFoundError if its library is not installed.
    """
    function = _HASH_FUNCTIONS.get(name)
    if function is None:
        raise ValueError(f"Unknown hash algorithm {name!r}; known: {', '.join(HASH_ALGORITHMS)}")
    if name.startswith("xxhash"):
        _xxh3_128(b"")
    return function
