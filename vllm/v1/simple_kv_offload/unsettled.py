"""Which content is findable on the device although the steps that compute it are still in flight.

Owns the keys of that content, of running requests and of those that let go of their blocks meanwhile. It must not know
pools, copies or what a key is asked for. Layer L4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from vllm.v1.core.block_hash import BlockHashWithGroupId, make_block_hash_with_group_id
from vllm.v1.request import Request


def prefix_keys(
    request: Request, group_ids: Sequence[int], unit: int, start_tokens: int, end_tokens: int
) -> Iterator[BlockHashWithGroupId]:
    """Every key, in any of the groups, under which a prefix of the request ending in ``(start, end]`` may be known."""
    for block_hash in request.block_hashes[start_tokens // unit : end_tokens // unit]:
        for group in group_ids:
            yield make_block_hash_with_group_id(block_hash, group)


def unsettled_ranges(
    requests: Iterable[Request], scheduled: Mapping[str, int], unit: int
) -> dict[str, tuple[int, int]]:
    """By request, the tokens ``(start, end]`` that steps in flight, the one being built included, are to compute.

    Without ranges in which no ``unit`` tokens end: so it is with most requests in most steps. The device hashes
    blocks before their bytes exist, and others may hit them: whoever holds such a block must not store it before the
    step has been processed.
    """
    ranges = {}
    for request in requests:
        # What `confirmed_tokens` tells, without a call: this looks at every request in every step.
        computed, in_flight = request.num_computed_tokens, request.num_in_flight_tokens
        placeholders = request.num_output_placeholders
        start = computed - (placeholders if placeholders > in_flight else in_flight)
        end = computed + scheduled.get(request.request_id, 0)
        if start // unit < end // unit:
            ranges[request.request_id] = (max(0, start), end)
    return ranges


class Unsettled:
    """A key is in it while its content must not be stored for a request that goes on."""

    def __init__(self, group_ids: Sequence[int], unit: int) -> None:
        self.keys: set[BlockHashWithGroupId] = set()
        """Those that `settle` has found, and what was left behind since."""
        self._group_ids = group_ids
        self._unit = unit
        self._computing: dict[str, tuple[int, int]] = {}
        # What ended or preempted requests left behind, with the step from which on it is settled.
        self._left_behind: list[tuple[int, set[BlockHashWithGroupId]]] = []

    def settle(self, requests: Mapping[str, Request], scheduled: Mapping[str, int], step: int) -> None:
        """Find out anew what steps in flight, and this one, which is being built, are still to compute."""
        unit = self._unit
        self.keys.clear()
        self._computing = unsettled_ranges(requests.values(), scheduled, unit)
        for request_id, (start, end) in self._computing.items():
            self.keys.update(prefix_keys(requests[request_id], self._group_ids, unit, start, end))
        if self._left_behind:
            self._left_behind = [entry for entry in self._left_behind if entry[0] > step]
            for _, keys in self._left_behind:
                self.keys |= keys

    def leave_behind(self, request: Request, num_confirmed: int, until_step: int) -> None:
        """The request lets go of its blocks; what its steps in flight were to compute stays unsettled with them."""
        start, end = self._computing.pop(request.request_id, (0, 0))
        keys = set(prefix_keys(request, self._group_ids, self._unit, max(start, num_confirmed), end))
        if keys:
            self._left_behind.append((until_step, keys))
            self.keys |= keys

    def __contains__(self, key: BlockHashWithGroupId) -> bool:
        return key in self.keys
