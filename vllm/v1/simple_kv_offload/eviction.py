"""In which order a tier gives its slots to new content: the contract of a policy, the table of them, and LRU.

Owns what a policy is told and asked. It must not know requests, copies or media. Layer L4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import ClassVar

from vllm.utils.registry import Registry, resolve_object
from vllm.v1.core.block_hash import BlockHashWithGroupId
from vllm.v1.core.block_ops import count_before
from vllm.v1.core.free_block_queue import FreeKVCacheBlockQueue
from vllm.v1.core.kv_cache_block import KVCacheBlock

DEFAULT_EVICTION_POLICY = "lru"
EVICTION_POLICIES = Registry(
    "eviction_policy",
    {
        "lru": "vllm.v1.simple_kv_offload.eviction:LruQueue",
        "arc": "vllm.v1.simple_kv_offload.arc:ArcQueue",
    },
    entry_point_group="vllm.kv_eviction_policies",
)


class Victims(ABC):
    """A look ahead at the slots that the next new contents will get; the queue must not change meanwhile."""

    @abstractmethod
    def peek(self) -> KVCacheBlock | None:
        """The next slot; None when there is none left."""

    def peek_for(self, key: BlockHashWithGroupId | None) -> Sequence[KVCacheBlock]:
        """The slots that content of this key would get: one, where it is not said otherwise. Empty if there are too few."""
        victim = self.peek()
        return () if victim is None else (victim,)

    def peek_widest(self) -> Sequence[KVCacheBlock]:
        """The next slots, as many as the largest content takes; fewer if there are no more."""
        return self.peek_for(None)

    @abstractmethod
    def take(self, key: BlockHashWithGroupId | None) -> None:
        """That slot is meant for content of this key (None: of any). There must be one."""


class EvictionQueue(ABC):
    """The slots that nobody holds, in an order of the policy's own. A held slot is in no list and never given away.

    Besides what a pool asks (`FreeQueue`) a policy hears what requests ask for. Every operation is O(1) per slot.
    """

    __slots__ = ()

    hears_misses: ClassVar[bool] = False
    """Whether `missed` does anything; telling it costs a walk over the request's hashes."""
    hears_incoming: ClassVar[bool] = True
    """Whether `incoming` does anything."""
    num_free_blocks: int

    @abstractmethod
    def victims(self) -> Victims:
        """A look ahead. Slots taken with `incoming` keys come in the order in which it shows them for those keys."""

    def num_takeable(self, keys: Sequence[BlockHashWithGroupId], spared: Set[BlockHashWithGroupId]) -> int:
        """How many of these contents, from the first on, would get a slot before one that holds a key of ``spared``."""
        victims = self.victims()
        for count, key in enumerate(keys):
            victim = victims.peek()
            if victim is None or victim.block_hash in spared:
                return count
            victims.take(key)
        return len(keys)

    def incoming(self, keys: Sequence[BlockHashWithGroupId | None]) -> None:
        """The slots that are taken next, all at once, are meant for these keys."""
        return

    def missed(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """A request wants content that the tier does not have."""
        return

    def used(self, blocks: Iterable[KVCacheBlock]) -> None:
        """A request reads these slots, held or not."""
        return

    def clear(self) -> None:
        """No slot has content any more."""
        return

    # What a pool asks; see `FreeKVCacheBlockQueue` for the meaning.

    @abstractmethod
    def popleft_n(self, n: int) -> list[KVCacheBlock]: ...

    @abstractmethod
    def remove(self, block: KVCacheBlock) -> None: ...

    @abstractmethod
    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None: ...

    @abstractmethod
    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None: ...

    @abstractmethod
    def put_back(self, blocks: Sequence[KVCacheBlock]) -> None: ...

    @abstractmethod
    def get_all_free_blocks(self) -> list[KVCacheBlock]: ...

    @abstractmethod
    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]: ...


class LruQueue(FreeKVCacheBlockQueue, EvictionQueue):
    """Least recently let go of first."""

    __slots__ = ()
    hears_incoming = False

    def victims(self) -> Victims:
        return _InOrder(self.iter_blocks_after(None))

    def num_takeable(self, keys: Sequence[BlockHashWithGroupId], spared: Set[BlockHashWithGroupId]) -> int:
        return count_before(self, len(keys), spared)


class _InOrder(Victims):
    """Slots in an order that does not depend on what they are for."""

    def __init__(self, blocks: Iterator[KVCacheBlock]) -> None:
        self._blocks = blocks
        self._next = next(blocks, None)

    def peek(self) -> KVCacheBlock | None:
        return self._next

    def take(self, key: BlockHashWithGroupId | None) -> None:
        self._next = next(self._blocks, None)


def eviction_queue(policy: str) -> Callable[[Sequence[KVCacheBlock]], EvictionQueue]:
    """The class behind a policy: a name of the table, of an entry point, or ``"module:Class"``.

    ``ValueError`` for an unknown name, what cannot be loaded, or what is no `EvictionQueue`.
    """
    try:
        found = resolve_object(policy) if ":" in policy else EVICTION_POLICIES.resolve(policy)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"eviction_policy={policy!r} cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, EvictionQueue)):
        raise ValueError(f"eviction_policy={policy!r} is no EvictionQueue but {found!r}")
    return found
