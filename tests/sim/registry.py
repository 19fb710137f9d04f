"""What each block hash stands for, learnt from the requests themselves: (salt, adapter, encoder input) and the exact tokens."""

from __future__ import annotations

from dataclasses import dataclass

from tests.sim.content import Chain, root
from tests.sim.failure import require
from vllm.distributed.kv_event_types import BlockStored
from vllm.v1.core.block_hash import maybe_convert_block_hash
from vllm.v1.request import Request


@dataclass(frozen=True)
class Meaning:
    """The prefix behind a hash. `identity` is (salt, adapter, encoder input)."""

    identity: tuple[str | None, str | None, str | None]
    tokens: tuple[int, ...]


class HashRegistry:
    """hash → prefix; a hash that stands for two prefixes is a failure by itself."""

    def __init__(self, hash_block_size: int) -> None:
        self.unit = hash_block_size
        self.meanings: dict[bytes, Meaning] = {}
        self.by_published: dict[object, bytes] = {}
        self._known: dict[str, int] = {}
        self.tokenless: set[object] = set()
        """Published hashes that an engine may announce without tokens."""
        self.is_terse = False
        """Any hash may be announced without tokens."""
        self._prints: dict[bytes, list[int]] = {}

    def learn(self, request: Request) -> None:
        """Take in the hashes the request has by now."""
        known = self._known.get(request.request_id, 0)
        hashes = request.block_hashes
        if known == len(hashes):
            return
        adapter = None if request.lora_request is None else request.lora_request.lora_name
        encoder = request.mm_features[0].identifier if request.mm_features else None
        identity = (request.cache_salt, adapter, encoder)
        tokens = tuple(request.all_token_ids)
        for i in range(known, len(hashes)):
            meaning = Meaning(identity, tokens[: (i + 1) * self.unit])
            block_hash = bytes(hashes[i])
            old = self.meanings.setdefault(block_hash, meaning)
            require(old == meaning, "I6", f"one hash for two prefixes: {old} and {meaning}")
            self.by_published[maybe_convert_block_hash(hashes[i])] = block_hash
        self._known[request.request_id] = len(hashes)

    def prints(self, block_hash: bytes) -> list[int]:
        """Fingerprints of all prefixes of what the hash covers."""
        if block_hash not in self._prints:
            meaning = self.meanings[block_hash]
            self._prints[block_hash] = Chain(root(*meaning.identity), list(meaning.tokens)).prints
        return self._prints[block_hash]

    def check_event(self, event: BlockStored) -> None:
        """An announcement's tokens and parents are those of its hashes."""
        size = event.block_size
        is_known = self.is_terse or self.tokenless.issuperset(event.block_hashes)
        if size == 0 and not event.token_ids and is_known:
            return
        require(
            len(event.token_ids) == size * len(event.block_hashes) and size > 0,
            "I7",
            f"{len(event.block_hashes)} hashes of {size} tokens but {len(event.token_ids)} tokens ({event.medium})",
        )
        parent = event.parent_block_hash
        for i, published in enumerate(event.block_hashes):
            block_hash = self.by_published.get(published)
            require(block_hash is not None, "I7", f"event about an unknown hash {published!r}")
            assert block_hash is not None
            tokens = self.meanings[block_hash].tokens
            told = tuple(event.token_ids[i * size : (i + 1) * size])
            require(tokens[-size:] == told, "I7", f"event tells tokens {told} for prefix {tokens}")
            before = tokens[:-size]
            if parent is None:
                require(
                    not before, "I7", f"event names no parent but the block starts at token {len(before)}"
                )
            else:
                known = self.by_published.get(parent)
                covers = None if known is None else self.meanings[known].tokens
                require(covers == before, "I7", f"event's parent covers {covers}, the block follows {before}")
            parent = published
