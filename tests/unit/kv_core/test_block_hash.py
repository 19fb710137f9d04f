"""Block hashes: keys, root, views, event form."""

from __future__ import annotations

import hashlib
import importlib
import pickle

import pytest

from vllm.utils.hashing import get_hash_fn_by_name, sha256, sha256_cbor, xxhash
from vllm.v1.core import block_hash, kv_cache_utils
from vllm.v1.core.block_hash import (
    DEFAULT_NONE_HASH_SEED,
    BlockHash,
    BlockHashListWithBlockSize,
    get_block_hash,
    get_group_id,
    get_none_hash_seed,
    init_none_hash,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
    none_hash,
    resolve_block_hashes,
)


@pytest.fixture(autouse=True)
def _restore_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_hash, "NONE_HASH", block_hash.NONE_HASH)
    monkeypatch.setattr(block_hash, "_none_hash_seed", block_hash._none_hash_seed)


def test_key_is_the_hash_followed_by_four_bytes_of_the_group() -> None:
    key = make_block_hash_with_group_id(BlockHash(b"abc"), 258)
    assert key == b"abc\x00\x00\x01\x02"
    assert get_block_hash(key) == b"abc"
    assert get_group_id(key) == 258


def test_event_form_is_the_last_eight_bytes_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    value = BlockHash(bytes(24) + (258).to_bytes(8, "big"))
    monkeypatch.delenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", raising=False)
    assert maybe_convert_block_hash(value) == 258
    assert maybe_convert_block_hash(BlockHash(b"\xff" * 32)) == 2**64 - 1
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    assert maybe_convert_block_hash(value) == value


def test_root_of_sha256_kinds_is_a_constant_without_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for fn in (sha256, sha256_cbor):
        init_none_hash(fn)
        assert none_hash() == fn(DEFAULT_NONE_HASH_SEED)
    assert get_none_hash_seed() == "vllm-none-hash"


def test_root_of_fast_hashes_is_random_without_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    init_none_hash(xxhash)
    first = none_hash()
    init_none_hash(xxhash)
    assert len(first) == 16
    assert none_hash() != first


def test_root_follows_pythonhashseed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "seed")
    init_none_hash(xxhash)
    assert none_hash() == xxhash("seed")


def test_facade_shows_the_live_root_even_after_reload() -> None:
    reloaded = importlib.reload(kv_cache_utils)
    reloaded.init_none_hash(sha256_cbor)
    assert block_hash.NONE_HASH == reloaded.NONE_HASH
    with pytest.raises(AttributeError, match="nonsense"):
        _ = reloaded.nonsense


def test_hashing_before_the_root_is_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_hash, "NONE_HASH", BlockHash(b""))
    with pytest.raises(RuntimeError, match="init_none_hash"):
        none_hash()


def test_sha256_hashes_the_pickled_value() -> None:
    value = (b"parent", (1, 2), None)
    assert sha256(value) == hashlib.sha256(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)).digest()
    assert get_hash_fn_by_name("sha256") is sha256


def test_view_takes_the_last_hash_of_each_larger_block() -> None:
    hashes = [BlockHash(bytes([i])) for i in range(10)]
    view = BlockHashListWithBlockSize(hashes, 2, 6)
    assert view.scale_factor == 3
    assert len(view) == 3
    assert list(view) == [hashes[2], hashes[5], hashes[8]]
    assert view[1] == hashes[5]
    assert view[-1] == hashes[8]
    assert view[1:] == [hashes[5], hashes[8]]
    assert view[::-1] == [hashes[8], hashes[5], hashes[2]]
    assert view[::2] == [hashes[2], hashes[8]]
    assert view[5:] == []
    with pytest.raises(IndexError):
        _ = view[3]
    with pytest.raises(ValueError, match="multiple"):
        BlockHashListWithBlockSize(hashes, 4, 6)


def test_resolve_gives_the_list_itself_where_no_view_is_needed() -> None:
    hashes = [BlockHash(b"a"), BlockHash(b"b")]
    assert resolve_block_hashes(hashes, 4, 4) is hashes
    fine = resolve_block_hashes(hashes, 4, 8, supports_fine_grained_hash_lookup=True, alignment_tokens=4)
    assert fine is hashes
    coarse = resolve_block_hashes(hashes, 4, 8, supports_fine_grained_hash_lookup=True, alignment_tokens=8)
    assert list(coarse) == [hashes[1]]
    assert list(resolve_block_hashes(hashes, 4, 8, alignment_tokens=4)) == [hashes[1]]
