"""Which of several replicas gets a request.  Layer L7.

Owns how many requests each replica has (all of them come from this one front end, so the counts are exact) and which prompts
it was given lately. Must not know sockets or what is really cached: a wrong guess costs a prefix hit, nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from vllm.v1.messages import EngineCoreRequest

# Prompts are known by their first 64, 128, 256 … tokens.
SHORTEST_START = 64
# Starts remembered per replica; the one that was met longest ago goes first.
STARTS_MAX = 16_384
# A replica that knows the start of a prompt is preferred while it has at most so many requests more than the idlest.
SPARE_REQUESTS = 2
SPARE_SHARE = 0.125


class ReplicaChoice:
    """`place` a request, `forget` it at its end. Among the replicas that are not too busy the one that has been given the
    longest start of the prompt gets it; else the one with the fewest requests, then the one that got fewest so far.
    """

    def __init__(self, num_replicas: int) -> None:
        self.loads = [0] * num_replicas
        self.placed = [0] * num_replicas
        self._replica_of: dict[str, int] = {}
        self._starts: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]

    def place(self, request: EngineCoreRequest) -> int:
        """The replica for a request: the one it asks for, if it does. ValueError if there is none of that number."""
        count = len(self.loads)
        chosen = request.data_parallel_rank
        if chosen is not None and not 0 <= chosen < count:
            raise ValueError(f"data_parallel_rank={chosen} must be in [0, {count})")
        starts = _starts_of(request) if count > 1 else []
        if chosen is None:
            chosen = self._choose(starts)
        self._replica_of[request.request_id] = chosen
        self.loads[chosen] += 1
        self.placed[chosen] += 1
        known = self._starts[chosen]
        for start in starts:
            known[start] = None
            known.move_to_end(start)
        while len(known) > STARTS_MAX:
            known.popitem(last=False)
        return chosen

    def _choose(self, starts: Sequence[int]) -> int:
        idlest = min(self.loads)
        busiest = idlest + SPARE_REQUESTS + int(idlest * SPARE_SHARE)
        candidates = [replica for replica, load in enumerate(self.loads) if load <= busiest]
        return min(
            candidates,
            key=lambda replica: (
                -self._num_known(replica, starts),
                self.loads[replica],
                self.placed[replica],
            ),
        )

    def _num_known(self, replica: int, starts: Sequence[int]) -> int:
        known = self._starts[replica]
        return next((length for length in range(len(starts), 0, -1) if starts[length - 1] in known), 0)

    def replica_of(self, request_id: str) -> int | None:
        """Where an unfinished request is; None if it is unknown."""
        return self._replica_of.get(request_id)

    def forget(self, request_id: str) -> None:
        """The request has ended; one that is unknown is ignored."""
        replica = self._replica_of.pop(request_id, None)
        if replica is not None:
            self.loads[replica] -= 1


def _starts_of(request: EngineCoreRequest) -> list[int]:
    """A hash for each start of the prompt, the shortest first. What hits must have alike is in it: salt and adapter."""
    tokens = request.prompt_token_ids or ()
    adapter = None if request.lora_request is None else request.lora_request.lora_name
    starts: list[int] = []
    key, begin, end = hash((request.cache_salt, adapter)), 0, SHORTEST_START
    while end <= len(tokens):
        key = hash((key, *tokens[begin:end]))
        starts.append(key)
        begin, end = end, 2 * end
    return starts
