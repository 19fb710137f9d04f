"""From the tokens of a request to its chain of block hashes. Layer: L3.

Owns the extra keys that keep equal tokens of different content apart, and the hasher that a request calls as it
grows. It must not know blocks, pools or groups.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

from vllm.utils.hashing import HashFn, sha256, sha256_cbor
from vllm.utils.native_core import native_core
from vllm.v1.core.block_hash import BlockHash, ExtraKeys, none_hash
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


class _AdapterVersions:
    """Tells adapters apart that come under one name and path but were loaded anew, perhaps with other weights.

    The first one seen keeps the plain key, so that processes agree on it; later ones add their number to it.
    """

    __slots__ = ("_first_ids",)

    def __init__(self) -> None:
        self._first_ids: dict[tuple[str, str], int] = {}

    def distinguish(self, lora: LoRAIdentity, keys: ExtraKeys) -> ExtraKeys:
        """The extra keys, the adapter's first among them, with its number added where that is needed."""
        files = (lora.lora_name, lora.lora_path)
        if self._first_ids.setdefault(files, lora.lora_int_id) == lora.lora_int_id:
            return keys
        return ((*keys[0], lora.lora_int_id), *keys[1:])


def get_request_block_hasher(
    hash_block_size: int, hash_fn: HashFn, num_hash_lookahead_tokens: int = 0
) -> BlockHasher:
    """A function from a request to the hashes of its full blocks that `request.block_hashes` lacks.

    Prompt and output tokens count alike. With lookahead L > 0 a block is hashed only once L more tokens exist, and
    its extra keys become `(keys over block and lookahead or None, t1 … tL)`. ValueError for sizes out of range.
    """
    if hash_block_size <= 0:
        raise ValueError(f"hash_block_size must be positive, got {hash_block_size}")
    if num_hash_lookahead_tokens < 0:
        raise ValueError(f"num_hash_lookahead_tokens must not be negative, got {num_hash_lookahead_tokens}")
    lookahead = num_hash_lookahead_tokens
    adapters = _AdapterVersions()

    def request_block_hasher(request: HashableRequest) -> list[BlockHash]:
        known = request.block_hashes
        start = len(known) * hash_block_size
        num_new = (request.num_tokens - lookahead - start) // hash_block_size
        if num_new <= 0:
            return []
        tokens = request.all_token_ids[start : start + num_new * hash_block_size + lookahead]
        parent = known[-1] if known else none_hash()
        extras = _extra_keys_by_block(request, start, num_new, hash_block_size, lookahead, adapters)
        if extras is None:
            return _hash_plain_chain(hash_fn, parent, tokens, hash_block_size)
        hashes: list[BlockHash] = []
        for i, keys in enumerate(extras):
            end = (i + 1) * hash_block_size
            extra: tuple[object, ...] | None = (keys, *tokens[end : end + lookahead]) if lookahead else keys
            block = tuple(tokens[i * hash_block_size : end])
            parent = BlockHash(hash_fn((parent, block, extra)))
            hashes.append(parent)
        return hashes

    return request_block_hasher


def _extra_keys_by_block(
    request: HashableRequest,
    start: int,
    num_blocks: int,
    block_size: int,
    lookahead: int,
    adapters: _AdapterVersions,
) -> list[ExtraKeys | None] | None:
    """Extra keys of the blocks from token `start` on; None where no block has any and none looks ahead."""
    salted = start == 0 and bool(request.cache_salt)
    lora = request.lora_request
    if not (
        salted or lookahead or lora is not None or request.mm_features or request.prompt_embeds is not None
    ):
        return None
    keys_by_block: list[ExtraKeys | None] = []
    mm_idx = 0
    for first in range(start, start + num_blocks * block_size, block_size):
        end = first + block_size + lookahead
        # An item that ends among the lookahead tokens still overlaps the next block, so that the search starts afresh.
        keys, mm_idx = generate_block_hash_extra_keys(request, first, end, 0 if lookahead else mm_idx)
        if lora is not None and keys is not None:
            keys = adapters.distinguish(lora, keys)
        keys_by_block.append(keys)
    return keys_by_block


def _hash_plain_chain(
    hash_fn: HashFn, parent: BlockHash, tokens: Sequence[int], block_size: int
) -> list[BlockHash]:
    """The hashes of consecutive blocks without extra keys."""
    if native_core is not None and hash_fn in (sha256, sha256_cbor):
        native = native_core.hash_chain(parent, tokens, block_size, hash_fn is sha256_cbor)
        if native is not None:  # None: some token is not a plain non-negative 31-bit number
            return cast(list[BlockHash], native)
    blocks = zip(*[iter(tokens)] * block_size, strict=False)
    if hash_fn is sha256:
        return _sha256_chain(parent, blocks)
    hashes: list[BlockHash] = []
    for block in blocks:
        parent = BlockHash(hash_fn((parent, block, None)))
        hashes.append(parent)
    return hashes


def _sha256_chain(parent: bytes, blocks: Iterable[tuple[int, ...]]) -> list[BlockHash]:
    """The default hash without a call per block: a long prompt spends its admission here."""
    digest_of, dumps, protocol = hashlib.sha256, pickle.dumps, pickle.HIGHEST_PROTOCOL
    hashes: list[bytes] = []
    append = hashes.append
    for block in blocks:
        parent = digest_of(dumps((parent, block, None), protocol)).digest()
        append(parent)
    return cast(list[BlockHash], hashes)
