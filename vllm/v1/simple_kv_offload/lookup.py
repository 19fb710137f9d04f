"""What a request may load from the tier, and the hold on what it was promised.

Owns the promises, keyed by request: a block that was promised is leased until the promise is
accepted, replaced or withdrawn. It must not know transfers or stores. Layer L4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_hash import BlockHash
from vllm.v1.core.block_lease import Lease
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    iter_layer_specs,
)
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.tier import Tier

logger = init_logger(__name__)


@dataclass(slots=True)
class Promise:
    """``blocks[g]``: what group g needs of the ``num_tokens`` tokens behind the local prefix (null = nothing)."""

    local_tokens: int
    num_tokens: int
    blocks: tuple[Sequence[KVCacheBlock], ...]
    lease: Lease


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Pairs ``tier_blocks[i] → group g's block number positions[i]`` of the request."""

    tier_blocks: list[KVCacheBlock]
    positions: list[tuple[int, int]]  # (group, index in the request's table)


class Promises:
    """At most one promise per request; bounded by the requests of the scheduler."""

    def __init__(self, tier: Tier, scheduler_block_size: int, hash_block_size: int) -> None:
        self._tier = tier
        self._scheduler_block_size = scheduler_block_size
        self._hash_block_size = hash_block_size
        self._chunk_sizes = chunk_sizes(tier.config)
        self._keeps_all_tokens = all(
            group.kv_cache_spec.keeps_all_tokens for group in tier.config.prefix_cacheable_groups
        )
        self._by_request: dict[str, Promise] = {}

    def lookup(self, request: Request, local_tokens: int) -> int:
        """Tokens that can be loaded behind the local prefix; leases them, replacing an earlier promise."""
        self.withdraw(request.request_id)
        if self._is_closed_to(request):
            return 0
        if not self._can_extend(local_tokens):
            self._warn_unaligned(local_tokens)
            return 0
        blocks, num_tokens = self._search(request, local_tokens, request.num_tokens - 1 - local_tokens)
        if num_tokens <= 0:
            return 0
        lease = Lease(self._tier.pool, _real(blocks), f"promise to {request.request_id}")
        self._by_request[request.request_id] = Promise(local_tokens, num_tokens, blocks, lease)
        return num_tokens

    def num_blocks(self, request_id: str) -> int:
        """Slots that the request's promise would read."""
        promise = self._by_request.get(request_id)
        return 0 if promise is None else len(promise.lease.blocks)

    def searchable(self, request: Request, local_tokens: int) -> tuple[Sequence[BlockHash], int] | None:
        """Hashes behind the local prefix and the tokens that a hit may have at most; None if nothing may be loaded."""
        max_tokens = request.num_tokens - 1 - local_tokens
        if self._is_closed_to(request) or not self._can_extend(local_tokens) or max_tokens <= 0:
            return None
        return request.block_hashes[local_tokens // self._hash_block_size :], max_tokens

    def peek(self, request: Request, local_tokens: int) -> int:
        """What `lookup` would return; promises, holds and reports nothing."""
        return self.peek_blocks(request, local_tokens)[1]

    def peek_blocks(self, request: Request, local_tokens: int) -> tuple[list[KVCacheBlock], int]:
        """What `lookup` would find, group by group, and what it would return."""
        if self._is_closed_to(request) or not self._can_extend(local_tokens):
            return [], 0
        with self._tier.turn:
            blocks, num_tokens = self._search(request, local_tokens, request.num_tokens - 1 - local_tokens)
            return (_real(blocks), num_tokens) if num_tokens > 0 else ([], 0)

    def accept(self, request: Request, num_tokens: int) -> tuple[LoadPlan, Lease] | None:
        """Turn the promise, or a shorter prefix of it, into a plan and the lease on its blocks.

        None if that many tokens cannot be delivered (there is no such promise, or a windowed or
        stateful group holds nothing that ends there); the promise is over in any case.
        """
        promise = self._by_request.pop(request.request_id, None)
        if promise is None:
            return None
        try:
            blocks = promise.blocks
            if num_tokens > promise.num_tokens:
                return None
            if num_tokens < promise.num_tokens and not self._keeps_all_tokens:
                # The blocks that a window or a state needs depend on where the prefix ends. (With drafts a search would
                # leave off the end of what is accepted, not of what was found.)
                blocks, found = self._search(request, promise.local_tokens, num_tokens)
                if found < num_tokens:
                    return None
            plan = self._plan(promise.local_tokens, num_tokens, blocks)
            owner = f"load of {request.request_id}"
            return plan, Lease(self._tier.pool, plan.tier_blocks, owner)
        finally:
            promise.lease.release()

    def withdraw(self, request_id: str) -> None:
        """Let go of what the request was promised, if anything."""
        promise = self._by_request.pop(request_id, None)
        if promise is not None:
            promise.lease.release()

    def withdraw_all(self) -> None:
        """Let go of everything."""
        for request_id in list(self._by_request):
            self.withdraw(request_id)

    def __iter__(self) -> Iterator[tuple[str, Promise]]:
        return iter(self._by_request.items())

    def __len__(self) -> int:
        return len(self._by_request)

    def _is_closed_to(self, request: Request) -> bool:
        return request.skip_reading_prefix_cache or not self._tier.is_open_to(request.load_tiers)

    def _can_extend(self, local_tokens: int) -> bool:
        # Positions are counted from the local prefix, so a chunk must not begin before its end.
        return all(local_tokens % size == 0 for size in (self._scheduler_block_size, *self._chunk_sizes))

    def _warn_unaligned(self, local_tokens: int) -> None:
        if local_tokens % self._scheduler_block_size != 0:
            logger.warning_once(
                "KV offload: a local prefix of %d tokens is not a multiple of the scheduler block size %d; "
                "nothing is loaded behind such prefixes.",
                local_tokens,
                self._scheduler_block_size,
            )

    def _search(
        self, request: Request, local_tokens: int, max_tokens: int
    ) -> tuple[tuple[Sequence[KVCacheBlock], ...], int]:
        if max_tokens <= 0:
            return (), 0
        hashes = request.block_hashes[local_tokens // self._hash_block_size :]
        return self._tier.find(hashes, max_tokens)

    def _plan(
        self, local_tokens: int, num_tokens: int, blocks: tuple[Sequence[KVCacheBlock], ...]
    ) -> LoadPlan:
        tier_blocks: list[KVCacheBlock] = []
        positions: list[tuple[int, int]] = []
        for group in self._tier.group_ids:
            size = self._tier.coordinator.group_block_sizes[group]
            first = local_tokens // size
            for offset, block in enumerate(blocks[group][: cdiv(num_tokens, size)]):
                if not block.is_null:
                    tier_blocks.append(block)
                    positions.append((group, first + offset))
        return LoadPlan(tier_blocks, positions)


def chunk_sizes(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Chunk sizes of the groups with chunked local attention."""
    sizes = {
        spec.attention_chunk_size
        for group in kv_cache_config.prefix_cacheable_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
        if isinstance(spec, ChunkedLocalAttentionSpec)
    }
    return tuple(sorted(sizes))


def _real(blocks: tuple[Sequence[KVCacheBlock], ...]) -> list[KVCacheBlock]:
    return [block for group in blocks for block in group if not block.is_null]
