"""From tokens to hashes: chaining, extra keys, lookahead."""

from __future__ import annotations

import hashlib
from itertools import combinations

import numpy as np
import pytest
import torch

from tests.helpers.kv_core import image, lora, request
from vllm.utils.hashing import sha256, sha256_cbor, xxhash, xxhash_cbor
from vllm.v1.core.block_hash import init_none_hash, none_hash
from vllm.v1.core.block_hasher import (
    generate_block_hash_extra_keys,
    get_request_block_hasher,
    hash_block_tokens,
    to_event_extra_keys,
)


@pytest.mark.parametrize("fn", [sha256, sha256_cbor, xxhash, xxhash_cbor])
@pytest.mark.parametrize("block", [1, 2, 3, 4, 16, 17])
def test_chain_equals_the_definition(fn, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.v1.core.block_hash.NONE_HASH", fn("root"))
    tokens = [0, 1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**40, 7] * 13
    req = request("r", tokens, hash_block=block, hash_fn=fn)
    parent = None
    for i in range(len(tokens) // block):
        parent = hash_block_tokens(fn, parent, tokens[i * block : (i + 1) * block])
        assert req.block_hashes[i] == parent
        if i == 0:
            assert parent == fn((none_hash(), tuple(tokens[:block]), None))
    assert len(req.block_hashes) == len(tokens) // block


def test_appended_tokens_extend_the_same_chain() -> None:
    whole = request("a", range(64)).block_hashes
    grown = request("b", range(20))
    for token in range(20, 64):
        grown.append_output_token_ids(token)
    assert grown.block_hashes == whole


def test_equal_tokens_after_a_different_start_have_different_hashes() -> None:
    a, b = request("a", [1, *range(31)]), request("b", [2, *range(31)])
    assert not set(a.block_hashes) & set(b.block_hashes)


@pytest.mark.parametrize("lookahead", [1, 3])
def test_lookahead_waits_for_further_tokens_and_hashes_them(lookahead: int) -> None:
    tokens = list(range(100, 100 + 8 + lookahead))
    req = request("r", tokens[:-1], hash_block=4, lookahead=lookahead)
    assert len(req.block_hashes) == 1
    req.append_output_token_ids(tokens[-1])
    first = sha256((none_hash(), tuple(tokens[:4]), (None, *tokens[4 : 4 + lookahead])))
    second = sha256((first, tuple(tokens[4:8]), (None, *tokens[8:])))
    assert req.block_hashes == [first, second]


def test_lookahead_counts_an_item_that_ends_in_the_next_block() -> None:
    # The item covers tokens 6..9: it overlaps block 1, its lookahead, and the start of block 2.
    features = [image("cat", 6, 4)]
    tokens = list(range(14))
    req = request("r", tokens, hash_block=4, lookahead=2, mm_features=features)
    expected, parent = [], none_hash()
    for i in range(3):
        start, end = 4 * i, 4 * i + 4
        keys, _ = generate_block_hash_extra_keys(req, start, end + 2, 0)
        parent = sha256((parent, tuple(tokens[start:end]), (keys, *tokens[end : end + 2])))
        expected.append(parent)
    assert req.block_hashes == expected
    assert generate_block_hash_extra_keys(req, 8, 14, 0)[0] == (("mm", "cat", -2),)


def test_no_lookahead_leaves_hashes_as_they_are() -> None:
    assert request("a", range(32), lookahead=0).block_hashes == request("b", range(32)).block_hashes


def test_extra_keys_come_in_order_and_with_tags() -> None:
    embeds = torch.arange(24, dtype=torch.float32).reshape(8, 3)
    req = request(
        "r",
        range(8),
        hash_block=4,
        lora_request=lora("style", 3, "/style"),
        cache_salt="tenant",
        mm_features=[image("cat", 1, 2), image("dog", 3, 3)],
        prompt_embeds=embeds,
    )
    keys, index = generate_block_hash_extra_keys(req, 0, 4, 0)
    digest = hashlib.sha256(embeds[0:4].numpy().tobytes()).digest()
    assert keys == (
        ("lora", "style", "/style"),
        ("mm", "cat", 1),
        ("mm", "dog", 3),
        ("cache_salt", "tenant"),
        ("prompt_embeds", digest),
    )
    assert index == 1
    keys, index = generate_block_hash_extra_keys(req, 4, 8, index)
    assert keys is not None
    assert keys[:2] == (("lora", "style", "/style"), ("mm", "dog", -1))
    assert [key[0] for key in keys] == ["lora", "mm", "prompt_embeds"]
    assert index == 2


def test_no_extra_keys_is_none() -> None:
    assert generate_block_hash_extra_keys(request("r", range(8)), 0, 4, 0) == (None, 0)


def test_embeddings_count_only_where_they_are() -> None:
    req = request("r", range(8), hash_block=4, prompt_embeds=torch.zeros(4, 2))
    assert generate_block_hash_extra_keys(req, 4, 8, 0)[0] is None


def test_events_carry_extra_keys_without_tags() -> None:
    keys = [
        (("lora", "style", "/style"), ("mm", "cat", 1), ("cache_salt", "s"), ("prompt_embeds", b"d")),
        None,
    ]
    assert to_event_extra_keys(keys) == [("style", ("cat", 1), "s", b"d"), None]
    assert to_event_extra_keys([]) is None


def test_pfx_06_salt_and_adapter_do_not_share_a_key_space() -> None:
    with_adapter = request("a", range(32), lora_request=lora("X", 1, "X"))
    with_salt = request("b", range(32), cache_salt="X")
    assert not set(with_adapter.block_hashes) & set(with_salt.block_hashes)


def test_pfx_06_any_two_different_identities_share_no_block() -> None:
    variants = [
        {},
        {"cache_salt": "X"},
        {"cache_salt": "Y"},
        {"lora_request": lora("X", 1, "/p")},
        {"lora_request": lora("X", 1, "/q")},
        {"lora_request": lora("/p", 1, "X")},
        {"mm_features": [image("X", 0, 4)]},
        {"mm_features": [image("Y", 0, 4)]},
        {"mm_features": [image("X", 1, 4)]},
        {"prompt_embeds": torch.zeros(32, 2)},
        {"prompt_embeds": torch.ones(32, 2)},
    ]
    hashes = [set(request(str(i), range(32), **more).block_hashes) for i, more in enumerate(variants)]
    for a, b in combinations(hashes, 2):
        assert not a & b


def test_pfx_07_adapters_under_one_name_do_not_share_blocks() -> None:
    first = request("a", range(32), lora_request=lora("n", 1, "/f1"))
    second = request("b", range(32), lora_request=lora("n", 2, "/f2"))
    assert not set(first.block_hashes) & set(second.block_hashes)


def test_pfx_07_an_adapter_loaded_anew_under_its_old_name_shares_nothing() -> None:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    req = request("r", range(32))
    req.block_hashes.clear()
    req.lora_request = lora("n", 1, "/f")
    before = hasher(req)
    assert before == hasher(req)
    req.lora_request = lora("n", 2, "/f")
    assert not set(before) & set(hasher(req))
    # A process that meets the adapter first under another number agrees with the first one.
    assert get_request_block_hasher(16, sha256)(req) == before


def test_tokens_of_other_integer_types_hash_as_the_definition_says() -> None:
    req = request("r", [np.int64(5)] * 4, hash_block=4)
    assert req.block_hashes == [sha256((none_hash(), (np.int64(5),) * 4, None))]


@pytest.mark.parametrize(("block", "lookahead"), [(0, 0), (-1, 0), (4, -1)])
def test_sizes_out_of_range_are_refused(block: int, lookahead: int) -> None:
    with pytest.raises(ValueError, match=r"hash_block_size|lookahead"):
        get_request_block_hasher(block, sha256, lookahead)
