"""Block hashes as values: types, keys per group, the chain's root, views at another block size, event form.

Owns what a block hash *is* and the module global `NONE_HASH`, the root of every chain. It must not know
requests, blocks or pools; how the tokens of a request become hashes is in `block_hasher.py`. Layer: L2.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NewType, TypedDict, overload

from vllm import envs
from vllm.logger import init_logger
from vllm.utils.hashing import HashFn, get_hash_fn_by_name, sha256, sha256_cbor

logger = init_logger(__name__)

BlockHash = NewType("BlockHash", bytes)
"""Identifies a token prefix up to the end of a block: the hash is chained over all blocks before it."""

BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)
"""A block hash followed by the group id as 4 big-endian bytes: the key of the block index."""

ExternalBlockHash = bytes | int
"""The form a block hash takes in KV events."""

ExtraKeys = tuple[tuple[object, ...], ...]
"""Tagged tuples that keep prefixes apart although their token ids are equal."""

DEFAULT_NONE_HASH_SEED = "vllm-none-hash"
GROUP_ID_BYTES = 4
_EVENT_HASH_MASK = (1 << 64) - 1

NONE_HASH: BlockHash = BlockHash(b"")
"""Parent of the first block of every chain. Empty until `init_none_hash` ran."""

_none_hash_seed: str | None = None


def resolve_none_hash_seed(hash_fn: HashFn) -> str:
    """The seed for `NONE_HASH`: PYTHONHASHSEED, else a constant for sha256 kinds, else 32 random bytes as hex.

    A constant root makes hashes equal across processes; the fast non-cryptographic kinds get a random one,
    because with a known root an attacker could search for collisions.
    """
    seed = envs.PYTHONHASHSEED
    if seed is not None:
        return seed
    if hash_fn in (sha256, sha256_cbor):
        return DEFAULT_NONE_HASH_SEED
    logger.warning(
        "PYTHONHASHSEED is not set: without sha256, block hashes differ between processes and restarts. "
        "Set it where caches are shared."
    )
    return os.urandom(32).hex()


def is_none_hash_constant(hash_fn: HashFn) -> bool:
    """Whether `NONE_HASH`, and with it every block hash, is the same in every process and after a restart."""
    return envs.PYTHONHASHSEED is not None or hash_fn in (sha256, sha256_cbor)


def init_none_hash(hash_fn: HashFn) -> None:
    """Set the root of all chains to `hash_fn(seed)`. Call once before any hasher runs; repeating it is harmless."""
    global NONE_HASH, _none_hash_seed
    _none_hash_seed = resolve_none_hash_seed(hash_fn)
    NONE_HASH = BlockHash(hash_fn(_none_hash_seed))


def get_none_hash_seed() -> str | None:
    """The seed that `init_none_hash` used last, or None before it ran."""
    return _none_hash_seed


def none_hash() -> BlockHash:
    """The current root of all chains; RuntimeError before `init_none_hash`."""
    if not NONE_HASH:
        raise RuntimeError("init_none_hash(hash_fn) must run before blocks are hashed")
    return NONE_HASH


def make_block_hash_with_group_id(block_hash: BlockHash, group_id: int) -> BlockHashWithGroupId:
    """The index key of `block_hash` in group `group_id`."""
    return block_hash + group_id.to_bytes(GROUP_ID_BYTES, "big")  # type: ignore[return-value]  # hot: no call of a NewType


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    """The hash inside an index key."""
    return BlockHash(key[:-GROUP_ID_BYTES])


def get_group_suffix(group_id: int) -> bytes:
    """What the index keys of a group end with: `key[-GROUP_ID_BYTES:]`."""
    return group_id.to_bytes(GROUP_ID_BYTES, "big")


def get_group_id(key: BlockHashWithGroupId) -> int:
    """The group id inside an index key."""
    return int.from_bytes(key[-GROUP_ID_BYTES:], "big")


def maybe_convert_block_hash(block_hash: BlockHash) -> ExternalBlockHash:
    """The hash as KV events carry it: its last 8 bytes as an unsigned integer, or all bytes.

    The integer form is the default of the environment variable VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES.
    """
    (converted,) = convert_block_hashes((block_hash,))
    return converted


def convert_block_hashes(block_hashes: Iterable[BlockHash]) -> list[ExternalBlockHash]:
    """As `maybe_convert_block_hash`, for many: the variable is read once."""
    if not envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES:
        return list(block_hashes)
    return [int.from_bytes(block_hash, "big") & _EVENT_HASH_MASK for block_hash in block_hashes]


class HashFacts(TypedDict):
    """What a consumer of KV events needs to compute the hashes in them: see `describe_hashing`."""

    algorithm: str
    hash_block_size: int
    lookahead_tokens: int
    form: str
    root_seed: str
    root: str | None


def describe_hashing(algorithm: str, hash_block_size: int, num_lookahead_tokens: int = 0) -> HashFacts:
    """How block hashes are made, and what of them events carry, in plain values.

    ``form``: "uint64", the last 8 bytes as a big-endian number, or "bytes". ``root_seed``: "constant", or
    "PYTHONHASHSEED", of which the root of all chains is the hash, or "random". ``root``: that hash in hexadecimal digits,
    unless it is random, or the algorithm is a fast one, whose collisions could be searched for with it.
    """
    hash_fn = get_hash_fn_by_name(algorithm)
    is_safe = hash_fn in (sha256, sha256_cbor)
    seed, root_seed = envs.PYTHONHASHSEED, "PYTHONHASHSEED"
    if seed is None:
        seed, root_seed = DEFAULT_NONE_HASH_SEED, "constant" if is_safe else "random"
    return HashFacts(
        algorithm=algorithm,
        hash_block_size=hash_block_size,
        lookahead_tokens=num_lookahead_tokens,
        form="uint64" if envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES else "bytes",
        root_seed=root_seed,
        root=hash_fn(seed).hex() if is_safe else None,
    )


class BlockHashListWithBlockSize(Sequence[BlockHash]):
    """A lazy view of hashes at `hash_block_size` as hashes of blocks of `target_block_size` tokens.

    Since hashes are chained, the hash of a large block is the hash of its last small one.
    """

    __slots__ = ("block_hashes", "scale_factor")

    def __init__(
        self, block_hashes: Sequence[BlockHash], hash_block_size: int, target_block_size: int
    ) -> None:
        if target_block_size % hash_block_size:
            raise ValueError(
                f"target_block_size {target_block_size} is not a multiple of hash_block_size {hash_block_size}"
            )
        self.block_hashes = block_hashes
        self.scale_factor = target_block_size // hash_block_size

    def __len__(self) -> int:
        return len(self.block_hashes) // self.scale_factor

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...

    @overload
    def __getitem__(self, index: slice) -> list[BlockHash]: ...

    def __getitem__(self, index: int | slice) -> BlockHash | list[BlockHash]:
        if isinstance(index, int):
            length = len(self)
            position = index + length if index < 0 else index
            if not 0 <= position < length:
                raise IndexError(f"block {index} of {length}")
            return self.block_hashes[(position + 1) * self.scale_factor - 1]
        start, stop, step = index.indices(len(self))
        scale = self.scale_factor
        if step > 0:
            return list(self.block_hashes[(start + 1) * scale - 1 : stop * scale : step * scale])
        return [self.block_hashes[(i + 1) * scale - 1] for i in range(start, stop, step)]

    def __iter__(self) -> Iterator[BlockHash]:
        scale = self.scale_factor
        return iter(self.block_hashes[scale - 1 : len(self) * scale : scale])


BlockHashList = Sequence[BlockHash]


def resolve_block_hashes(
    block_hashes: Sequence[BlockHash],
    hash_block_size: int,
    block_size: int,
    *,
    supports_fine_grained_hash_lookup: bool = False,
    alignment_tokens: int | None = None,
) -> BlockHashList:
    """The hashes as a kind with `block_size` looks them up.

    The list itself where the sizes are equal, or where the kind can end a hit inside a block and hits are
    aligned finer than its blocks; otherwise a view with one hash per block.
    """
    if hash_block_size == block_size:
        return block_hashes
    if (
        supports_fine_grained_hash_lookup
        and alignment_tokens is not None
        and alignment_tokens < block_size
        and block_size % alignment_tokens == 0
    ):
        return block_hashes
    return BlockHashListWithBlockSize(block_hashes, hash_block_size, block_size)
