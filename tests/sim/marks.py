"""Names of rare situations. A set of seeds that reaches none of a name proves nothing about it, so CI asks for all."""

from __future__ import annotations

from collections import Counter

MARKS = frozenset(
    {
        "content protected",
        "protection refused",
        "content to go first",
        "hold ended",
        "local hit",
        "hit with a split context",
        "external hit",
        "hit in one group without room in another",
        "preempt",
        "preempt with a store in flight",
        "waits for its grammar",
        "grammar refused",
        "abort while the grammar is compiled",
        "abort while waiting",
        "abort while running",
        "abort during load",
        "abort with a store in flight",
        "reset",
        "reset refused",
        "reset in flight",
        "reset with running requests",
        "host full",
        "host eviction",
        "shortened load",
        "rank skew",
        "repeated ask",
        "failed load",
        "failed load, recompute",
        "failed load, error",
        "failed store",
        "lost block reported",
        "loads finish out of order",
        "step failed",
        "NaN logits",
        "two steps in flight",
        "three steps in flight",
        "request waits for memory",
        "overtaken",
        "finish with a step in flight",
        "salted request",
        "adapter request",
        "full prompt cached",
        "window slid",
        "state kept",
        "ring used",
        "scratch used",
        "bounded replay",
        "copy on write",
        "resumed with a hit",
        "paused",
        "lazy store",
        "eager store",
        "stall",
        "move down",
        "move down failed",
        "move up",
        "move up failed",
        "disk eviction",
        "wait for the disk",
        "wait for the disk in vain",
        "abort while blocks come up",
        "disk written to no more",
        "killed",
        "killed while copies ran",
        "kept blocks found again",
        "kept order missed",
        "withdrawn for good",
        "a disk in place of the host kept",
        "ARC adapts",
        "ARC has both lists",
        "declined for reuse",
        "stored for reuse",
        "offers forgotten",
        "store plan cut",
        "preempted work stored first",
        "slow tier declined",
        "slow tier read again",
        "drafts accepted",
        "drafts refused",
        "start behind refused drafts",
        "store to a second connector",
        "load from a second connector",
        "second host eviction",
        "load of what another engine stored",
        "load from the rank's own part",
        "replicas take turns",
        "another engine reads",
        "another engine evicts",
        "another engine finds a block lost",
        "another engine resets",
        "another engine dies",
        "another engine dies in the middle",
    }
)


class Marks:
    """Counts of the marks that a run reached."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def hit(self, name: str) -> None:
        """Count one; only listed names are allowed."""
        if name not in MARKS:
            raise KeyError(f"unlisted mark {name!r}")
        self.counts[name] += 1
