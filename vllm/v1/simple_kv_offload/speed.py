"""Whether reading a tier is worth it: what loads have cost lately against what computing has.

Owns the running measures and the requests that were turned away because of them. It must not measure anything itself,
nor know blocks or copies. Layer L4.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.simple_kv_offload.metadata import Timings

logger = init_logger(__name__)

MARGIN = 2.0
"""A load may take so many times as long as computing: it does so beside other requests."""
SAMPLES_MIN = 4
"""Reports of each kind before anything is declined."""
PROBE_EVERY = 16
"""One of so many requests reads a tier that would be declined, so that the measure notices when it recovers."""
_SLOWER_WEIGHT = 0.25
_FASTER_WEIGHT = 0.5


@dataclass(slots=True)
class Rate:
    """Seconds per unit, a running mean that believes good news sooner than bad."""

    value: float = 0.0
    samples: int = 0

    def add(self, seconds: float, units: int) -> None:
        """So much was done in that time."""
        if units <= 0:
            return
        self.samples += 1
        sample = seconds / units
        weight = _FASTER_WEIGHT if sample < self.value else _SLOWER_WEIGHT
        # The first samples count alike.
        self.value += max(weight, 1 / self.samples) * (sample - self.value)


class SpeedCheck:
    """Declines hits in the ``checked`` tiers while a load would take longer than computing the same tokens.

    ``first`` is the tier that the device loads from; a disk below it is read into that one. A request that was declined,
    or let through as a probe, gets the same answer until it is admitted or ends.
    """

    def __init__(self, checked: frozenset[CacheHitSource], first: CacheHitSource) -> None:
        self.checked = checked
        self.prefill = Rate()
        self.loads = {source: Rate() for source in sorted(checked)}
        self.declines = dict.fromkeys(self.loads, 0)
        self.is_slow = dict.fromkeys(self.loads, False)
        """By tier, whether the last hit was too slow."""
        self.probe_every = PROBE_EVERY
        self.samples_min = SAMPLES_MIN
        self._first = first
        self._turned_away = dict.fromkeys(self.loads, 0)
        self._answers: dict[str, dict[CacheHitSource, bool]] = {}

    def observe(self, timings: Timings) -> None:
        """What the workers measured."""
        self.prefill.add(timings.prefill_seconds, timings.prefill_tokens)
        below = CacheHitSource.DISK
        for source, seconds, blocks in (
            (self._first, timings.load_seconds, timings.load_blocks),
            (below, timings.disk_seconds, timings.disk_blocks),
        ):
            if source in self.loads:
                self.loads[source].add(seconds, blocks)

    def declines_hit(self, request_id: str, source: CacheHitSource, num_blocks: int, num_tokens: int) -> bool:
        """Whether the request should compute these tokens instead of reading these blocks."""
        if source not in self.loads:
            return False
        answers = self._answers.setdefault(request_id, {})
        if source not in answers:
            answers[source] = self._decide(source, num_blocks, num_tokens)
        return answers[source]

    def forget_request(self, request_id: str) -> None:
        """The request was admitted or ended: it is asked anew next time."""
        self._answers.pop(request_id, None)

    def _decide(self, source: CacheHitSource, num_blocks: int, num_tokens: int) -> bool:
        load = self.loads[source]
        known = min(load.samples, self.prefill.samples) >= self.samples_min
        slow = known and load.value * num_blocks > MARGIN * self.prefill.value * num_tokens
        self.is_slow[source] = slow
        if not slow:
            self._turned_away[source] = 0
            return False
        self._turned_away[source] += 1
        if self._turned_away[source] % self.probe_every == 0:
            return False
        self.declines[source] += 1
        logger.warning_once(
            "KV offload: reading the %s tier takes longer than computing; its hits are not used for now. "
            "vllm:simple_kv_offload_tier_slow tells while that is so; decline_slow_tier=off uses them all the same.",
            source.value,
        )
        return True

    @property
    def num_requests(self) -> int:
        """Requests under way with an answer."""
        return len(self._answers)


def speed_check(decline_slow_tier: str, first: CacheHitSource, *, has_disk_below: bool) -> SpeedCheck:
    """The check of the tiers that the setting means, of those that there are."""
    tiers = {first, CacheHitSource.DISK} if has_disk_below else {first}
    chosen = {
        "off": frozenset[CacheHitSource](),
        "disk": frozenset({CacheHitSource.DISK}),
        "all": frozenset(tiers),
    }
    return SpeedCheck(chosen[decline_slow_tier] & tiers, first)
