"""The native chain of block hashes has the bytes of its Python reference. Without the library nothing is compared here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.utils.hashing import HashFn, sha256, sha256_cbor
from vllm.utils.native_core import NativeCore, native_core
from vllm.v1.core.block_hasher import hash_block_tokens

pytestmark = pytest.mark.skipif(native_core is None, reason="the native KV core is not built")


def core() -> NativeCore:
    assert native_core is not None
    return native_core


@pytest.fixture(params=[False, True], ids=["best", "portable"])
def portable(request: pytest.FixtureRequest) -> Iterator[bool]:
    core().select_portable_sha256(request.param)
    yield request.param
    core().select_portable_sha256(False)


plain_tokens = st.one_of(
    st.integers(0, 30), st.integers(250, 260), st.integers(65530, 65540), st.integers(0, (1 << 31) - 1)
)


def reference_chain(hash_fn: HashFn, parent: bytes, tokens: Sequence[int], size: int) -> list[bytes]:
    chain: list[Any] = [parent]
    for start in range(0, len(tokens) - size + 1, size):
        chain.append(hash_block_tokens(hash_fn, chain[-1], tokens[start : start + size]))
    return chain[1:]


@pytest.mark.parametrize("hash_fn", [sha256, sha256_cbor])
@pytest.mark.usefixtures("portable")
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_chain_has_the_bytes_of_the_reference(hash_fn: HashFn, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from((1, 2, 3, 4, 5, 16, 23, 24, 64, 300)))
    parent = data.draw(st.binary(min_size=1, max_size=255))
    pattern = data.draw(st.lists(plain_tokens, min_size=1, max_size=40))
    tokens = (pattern * (2 * size // len(pattern) + 1))[: data.draw(st.integers(0, 2 * size))]
    expected = reference_chain(hash_fn, parent, tokens, size)
    assert core().hash_chain(parent, tokens, size, hash_fn is sha256_cbor) == expected
    assert core().hash_chain(parent, tuple(tokens), size, hash_fn is sha256_cbor) == expected


@pytest.mark.parametrize("token", [-1, 1 << 31, 1 << 80, True, None, 1.5, "1"])
@pytest.mark.parametrize("is_cbor", [False, True])
def test_tokens_that_are_no_plain_numbers_are_left_to_the_reference(token: object, is_cbor: bool) -> None:
    assert core().hash_chain(b"parent", [1, token], 2, is_cbor) is None


def test_sizes_that_the_chain_does_not_encode_are_left_to_the_reference() -> None:
    native = core()
    assert native.hash_chain(b"p" * 256, [1, 2], 2, False) is None
    assert native.hash_chain(b"p", [1] * 8193, 8193, False) is None
    largest = native.hash_chain(b"p", [1 << 30] * 8192, 8192, False)
    assert largest == reference_chain(sha256, b"p", [1 << 30] * 8192, 8192)
