"""Questions about the KV cache that a client may put to a core.  Layer L7.

Owns the form of the answers: plain values that cross a socket. Changes nothing in the core. Must not know sockets or text.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.request import BlockHasher, Request

# Never in the scheduler, so that it cannot clash with a request's id.
LOOKUP_ID = "kv-cache-lookup"


class CacheInquiry:
    """Look-ups and reports of one core; `block_hasher` None: nothing is cached."""

    def __init__(self, scheduler: SchedulerInterface, block_hasher: BlockHasher | None) -> None:
        self._scheduler = scheduler
        self._block_hasher = block_hasher

    def lookup(
        self,
        token_ids: list[int],
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> dict[str, Any] | None:
        """How many of the tokens a request would find cached now, and where: the fields of `CacheLookup`.

        The cache is as if nobody had asked. None: the scheduler cannot tell.
        """
        request = Request(
            LOOKUP_ID,
            token_ids,
            SamplingParams(max_tokens=1),
            None,
            arrival_time=0.0,
            lora_request=lora_request,
            cache_salt=cache_salt,
            block_hasher=self._block_hasher,
        )
        found = self._scheduler.peek_kv_cache(request)
        return None if found is None else dataclasses.asdict(found)

    def report(self) -> dict[str, Any] | None:
        """The fields of `KVCacheReport`. None: the scheduler cannot tell."""
        report = self._scheduler.get_kv_cache_report()
        return None if report is None else dataclasses.asdict(report)
