"""From the tokens of a request to its chain of block hashes. Layer: L3.

Owns the extra keys that keep equal tokens of different content apart, and the hasher that a request calls as it
grows. It must not know blocks, pools or groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from vllm.v1.core.block_hash import BlockHash, ExtraKeys, HashFn, none_hash
from vllm.v1.utils import tensor_data


class LoRAIdentity(Protocol):
    """What identifies an adapter: name, number and files. A name alone may be used again for other weights."""

    @property
    def lora_name(self) -> str: ...
    @property
    def lora_int_id(self) -> int: ...
    @property
    def lora_path(self) -> str: ...


class PlaceholderRange(Protocol):
    """Where a multimodal item stands in the prompt, in tokens."""

    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...


class MultiModalFeature(Protocol):
    """One multimodal item of a prompt; the identifier names its content."""

    @property
    def identifier(self) -> str: ...
    @property
    def mm_position(self) -> PlaceholderRange: ...


class HashableRequest(Protocol):
    """What hashing and KV events read of a request."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def block_hashes(self) -> list[BlockHash]: ...
    @property
    def lora_request(self) -> LoRAIdentity | None: ...
    @property
    def mm_features(self) -> Sequence[MultiModalFeature]: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def prompt_embeds(self) -> Any: ...  # a torch.Tensor or None; opaque here
    @property
    def session_id(self) -> str | None: ...


BlockHasher = Callable[[HashableRequest], list[BlockHash]]


def _mm_extra_keys(
    request: HashableRequest, start: int, end: int, start_mm_idx: int
) -> tuple[list[tuple[object, ...]], int]:
    """Keys of the items overlapping tokens `[start, end)`, and the first item that may overlap later blocks."""
    keys: list[tuple[object, ...]] = []
    features = request.mm_features
    index = start_mm_idx
    while index < len(features):
        position = features[index].mm_position
        if position.offset >= end:
            break
        item_end = position.offset + position.length
        if item_end > start:
            keys.append(("mm", features[index].identifier, position.offset - start))
        if item_end > end:
            break  # the item goes on in the next block
        index += 1
    return keys, index


def generate_block_hash_extra_keys(
    request: HashableRequest, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[ExtraKeys | None, int]:
    """The tagged extra keys of tokens `[start, end)` and the index of the first item for the next call.

    Order: adapter, multimodal items, salt (first block only), prompt embeddings; None if there is none. Items must
    be sorted by offset. Tags keep kinds apart: a salt never equals an adapter name.
    """
    keys: list[tuple[object, ...]] = []
    lora = request.lora_request
    if lora is not None:
        keys.append(("lora", lora.lora_name, lora.lora_path))
    next_mm_idx = start_mm_idx
    if request.mm_features:
        mm_keys, next_mm_idx = _mm_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)
        keys += mm_keys
    if start_token_idx == 0 and request.cache_salt:
        keys.append(("cache_salt", request.cache_salt))
    embeds = request.prompt_embeds
    if embeds is not None and start_token_idx < len(embeds):
        digest = hashlib.sha256(tensor_data(embeds[start_token_idx:end_token_idx])).digest()
        keys.append(("prompt_embeds", digest))
    return (tuple(keys) if keys else None), next_mm_idx


def to_event_extra_keys(keys_by_block: Sequence[ExtraKeys | None]) -> list[tuple[object, ...] | None] | None:
    """Extra keys as KV events carry them, without tags: `("mm", id, offset)` → `(id, offset)`, others → the value."""
    if not keys_by_block:
        return None
    return [
        None if keys is None else tuple(key[1:] if key[0] == "mm" else key[1] for key in keys)
        for keys in keys_by_block
    ]


def hash_block_tokens(
    hash_function: HashFn,
    parent_block_hash: BlockHash | None,
    curr_block_token_ids: Sequence[int],
    extra_keys: tuple[object, ...] | None = None,
) -> BlockHash:
    """The hash of a block: `hash_function((parent or NONE_HASH, tuple(tokens), extra keys))`."""
    parent = parent_block_hash or none_hash()
    return BlockHash(hash_function((parent, tuple(curr_block_token_ids), extra_keys)))


def get_request_block_hasher(
    hash_block_size: int, hash_fn: HashFn, num_hash_lookahead_tokens: int = 0
) -> BlockHasher:
    """A function from a request to the hashes of its full blocks that `request.block_hashes` lacks.

    Prompt and output tokens count alike. With lookahead L > 0 a block is hashed only once L more tokens exist, and
    its extra keys become `(keys over block and lookahead or None, t1 … tL)`.
    """
    if hash_block_size <= 0:
        raise ValueError(f"hash_block_size must be positive, got {hash_block_size}")
    if num_hash_lookahead_tokens < 0:
        raise ValueError(f"num_hash_lookahead_tokens must not be negative, got {num_hash_lookahead_tokens}")
    lookahead = num_hash_lookahead_tokens

    def request_block_hasher(request: HashableRequest) -> list[BlockHash]:
        num_hashed = len(request.block_hashes)
        start = num_hashed * hash_block_size
        num_new = (request.num_tokens - lookahead - start) // hash_block_size
        if num_new <= 0:
            return []
        tokens = request.all_token_ids[start : start + num_new * hash_block_size + lookahead]
        parent = request.block_hashes[-1] if num_hashed else none_hash()
        hashes: list[BlockHash] = []
        mm_idx = 0
        for offset in range(0, num_new * hash_block_size, hash_block_size):
            end = offset + hash_block_size
            keys, mm_idx = generate_block_hash_extra_keys(
                request, start + offset, start + end + lookahead, mm_idx
            )
            extra: tuple[object, ...] | None = keys
            if lookahead:
                extra = (keys, *tokens[end : end + lookahead])
            parent = BlockHash(hash_fn((parent, tuple(tokens[offset:end]), extra)))
            hashes.append(parent)
        return hashes

    return request_block_hasher
