"""What a connector promises and what is accepted of it, seen from outside."""

from __future__ import annotations

import random
from typing import Protocol

from tests.sim.marks import Marks
from tests.sim.rng import Streams
from tests.sim.world import World
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.request import Request


class PromiseWatcher(Protocol):
    """The part of a run that watching needs."""

    world: World
    marks: Marks
    streams: Streams

    def fault(self, site: str, rng: random.Random) -> bool: ...


def watch_promises(run: PromiseWatcher, connector: KVConnectorBase_V1) -> None:
    """Notice loads that are accepted with fewer tokens than were promised."""
    ask, accept = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
    promised: dict[str, int] = {}
    unit = run.world.scheduler_block_size

    def asked(request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, is_async = ask(request, num_computed_tokens)
        promised[request.request_id] = tokens or 0
        rng = run.streams.stream(f"{request.request_id}/{tokens}/{num_computed_tokens}")
        if tokens and run.fault("short accept", rng):  # taking less than was promised is legal
            tokens -= rng.randint(0, (tokens - 1) // unit) * unit
        return tokens, is_async

    def accepted(request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if 0 < num_external_tokens < promised.pop(request.request_id, 0):
            run.marks.hit("shortened load")
        accept(request, blocks, num_external_tokens)

    connector.get_num_new_matched_tokens = asked  # type: ignore[method-assign]
    connector.update_state_after_alloc = accepted  # type: ignore[method-assign]
