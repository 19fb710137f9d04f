"""Which content is worth a copy because it was wanted before, and which has had one: offers and copies by hash.

Owns the counts, how far each request's prefix is worth a copy, and what was copied lately. It must not know blocks,
tiers or copies. Layer L4.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Set

from vllm.v1.core.block_hash import BlockHash, BlockHashWithGroupId
from vllm.v1.request import Request

DEFAULT_MAX_TRACKER_SIZE = 64_000


class ReuseFilter:
    """Admits content that ``threshold`` requests have had; with a threshold of 0 or 1, all of it.

    Each request offers each of its hashes once, in order. What of a request is admitted is always a prefix, so a copy
    never lacks the ones before it for want of admission. At most ``max_size`` hashes are remembered, those offered last.
    """

    def __init__(self, threshold: int = 0, max_size: int = DEFAULT_MAX_TRACKER_SIZE) -> None:
        self.is_on = threshold > 1
        """Whether anything can be declined."""
        self._threshold = threshold
        self._max_size = max_size
        self._counts: OrderedDict[BlockHash, int] = OrderedDict()
        # Per request: hashes offered so far, and how many from the first on are admitted.
        self._progress: dict[str, tuple[int, int]] = {}

    def offer(self, request: Request, num_hashes: int) -> None:
        """The request has the content of its first ``num_hashes`` hashes."""
        if not self.is_on:
            return
        hashes = request.block_hashes
        offered, admitted = self._progress.get(request.request_id, (0, 0))
        end = min(num_hashes, len(hashes))
        # Backwards: of a chain that does not fit, the end is forgotten first.
        for index in range(end - 1, offered - 1, -1):
            self._count(hashes[index])
        self._progress[request.request_id] = (max(offered, end), admitted)

    def num_admitted(self, request: Request) -> int:
        """How many of the request's hashes, from the first on, are admitted; that never falls while it lives."""
        hashes = request.block_hashes
        if not self.is_on:
            return len(hashes)
        offered, admitted = self._progress.get(request.request_id, (0, 0))
        before = admitted
        while admitted < len(hashes) and self.admits(hashes[admitted]):
            admitted += 1
        if admitted > before:
            self._progress[request.request_id] = (offered, admitted)
        return admitted

    def admits(self, block_hash: BlockHash) -> bool:
        """Whether the prefix that ends with this hash was offered often enough."""
        return not self.is_on or self._counts.get(block_hash, 0) >= self._threshold

    def forget_request(self, request_id: str) -> None:
        """The request ended; its offers count on."""
        self._progress.pop(request_id, None)

    def _count(self, block_hash: BlockHash) -> None:
        self._counts[block_hash] = self._counts.pop(block_hash, 0) + 1
        if len(self._counts) > self._max_size:
            self._counts.popitem(last=False)

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def num_requests(self) -> int:
        """Requests under way that have offered something."""
        return len(self._progress)


class CopiedLately:
    """What lazy stores have copied since the device lost as many blocks as are in danger of that at a time.

    Time is counted in blocks that the device has lost: where it loses none, nothing is new, and no copy is wanted twice.
    """

    def __init__(self) -> None:
        self._copied: dict[BlockHashWithGroupId, int] = {}  # and when, the earliest first

    def note(self, keys: Iterable[BlockHashWithGroupId], now: int) -> None:
        """These were copied."""
        for key in keys:
            self._copied.pop(key, None)
            self._copied[key] = now

    def among(
        self, keys: Set[BlockHashWithGroupId], now: int, *, span: int, limit: int
    ) -> set[BlockHashWithGroupId]:
        """Those of the keys that were copied in the last ``span`` of that time; of all, ``limit`` are remembered."""
        copied = self._copied
        while copied:
            first = next(iter(copied))
            if len(copied) <= limit and now - copied[first] < span:
                break
            del copied[first]
        return {key for key in keys if key in copied} if copied else set()

    def __len__(self) -> int:
        return len(self._copied)
