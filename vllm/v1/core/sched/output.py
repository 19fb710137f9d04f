"""One scheduling step as data: what the workers are told.

Owns the records from scheduler to workers and connectors.  Must not know how they were decided.
Layer: L2 (values).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_connector_types import KVConnectorMetadata
from vllm.v1.request import Request

BlockIds = tuple[list[int], ...]
"""Block ids per KV cache group."""


@dataclass
class NewRequestData:
    """A request that the workers see for the first time, or again after a preemption."""

    req_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[Any]  # opaque items of a multimodal front end
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None
    block_ids: BlockIds
    """The whole block table per group."""
    num_computed_tokens: int
    """Tokens computed before this step."""
    lora_request: LoRARequest | None
    prompt_embeds: Any = None  # a tensor, opaque here
    prompt_is_token_ids: list[bool] | None = None
    prefill_token_ids: list[int] | None = None
    """All known tokens (prompt and earlier output) where they are sent, else None."""
    replay_start: int = 0
    """Tokens from here up to the cached end are only recomputed for a window; 0 = no replay."""

    @classmethod
    def from_request(
        cls,
        request: Request,
        block_ids: BlockIds,
        prefill_token_ids: list[int] | None = None,
        uses_mrope: bool = False,
    ) -> NewRequestData:
        """The record of ``request`` as it is now.  ``uses_mrope`` keeps media items whose positions are needed."""
        del uses_mrope  # media items are always sent, so positions can be derived on the worker
        return cls(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            mm_features=request.mm_features,
            sampling_params=request.sampling_params,
            pooling_params=request.pooling_params,
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
            lora_request=request.lora_request,
            prompt_embeds=request.prompt_embeds,
            prompt_is_token_ids=request.prompt_is_token_ids,
            prefill_token_ids=prefill_token_ids,
            replay_start=request.replay_start,
        )

    @property
    def prompt_len(self) -> int:
        """Prompt tokens, given as ids or as embeddings."""
        return len(self.prompt_embeds) if self.prompt_token_ids is None else len(self.prompt_token_ids)

    def anon_repr(self) -> str:
        """Like ``repr`` with lengths in place of token values, so that logs hold no user text."""
        prefill = None if self.prefill_token_ids is None else len(self.prefill_token_ids)
        return (
            f"NewRequestData(req_id={self.req_id}, prompt_token_ids_len={self.prompt_len}, "
            f"prefill_token_ids_len={prefill}, num_mm_features={len(self.mm_features)}, "
            f"sampling_params={self.sampling_params}, block_ids={self.block_ids}, "
            f"num_computed_tokens={self.num_computed_tokens}, lora_request={self.lora_request}, "
            f"replay_start={self.replay_start})"
        )


@dataclass
class CachedRequestData:
    """Requests that the workers know already, as parallel lists."""

    req_ids: list[str]
    resumed_req_ids: set[str]
    """Those whose block table is replaced instead of extended."""
    new_token_ids: list[list[int]]
    """Only with pipeline parallelism without async scheduling, else empty."""
    all_token_ids: dict[str, list[int]]
    """V1 runner: all tokens of requests that were not in the previous step."""
    new_block_ids: list[BlockIds | None]
    """Per request: None, or per group the ids to append (to replace the table for resumed requests)."""
    num_computed_tokens: list[int]
    num_output_tokens: list[int]

    @classmethod
    def make_empty(cls) -> CachedRequestData:
        """No requests."""
        return cls([], set(), [], {}, [], [], [])

    @property
    def num_reqs(self) -> int:
        """How many requests are listed."""
        return len(self.req_ids)

    def is_context_phase(self, req_id: str) -> bool:
        """True if the request has not produced a token yet; False also for unknown ids."""
        if req_id not in self.req_ids:
            return False
        return self.num_output_tokens[self.req_ids.index(req_id)] == 0

    def anon_repr(self) -> str:
        """Like ``repr`` with lengths in place of token values, so that logs hold no user text."""
        return (
            f"CachedRequestData(req_ids={self.req_ids}, resumed_req_ids={sorted(self.resumed_req_ids)}, "
            f"new_token_ids_lens={[len(ids) for ids in self.new_token_ids]}, "
            f"all_token_ids_lens={ {key: len(ids) for key, ids in self.all_token_ids.items()} }, "
            f"new_block_ids={self.new_block_ids}, num_computed_tokens={self.num_computed_tokens}, "
            f"num_output_tokens={self.num_output_tokens})"
        )


@dataclass(slots=True)
class KVConnectorBlockState:
    """Block tables as connectors may read them while they build the orders of a step.

    ``resolve_block_ids`` gives the current table of a request per group.  ``boundary_state_offloads`` lists per
    request ``(group, block id, tokens)``: recurrent states that are final and ready to be stored.
    """

    req_ids: set[str]
    resolve_block_ids: Callable[[str], BlockIds]
    boundary_state_offloads: dict[str, list[tuple[int, int, int]]]

    def get_block_ids(self, req_id: str) -> BlockIds | None:
        """The table of ``req_id``; None for a request outside this step."""
        return self.resolve_block_ids(req_id) if req_id in self.req_ids else None


@dataclass
class ScheduledEncoderInputStats:
    """Encoder work of one step."""

    num_inputs: int = 0
    output_tokens: int = 0


@dataclass
class SchedulerOutput:
    """Everything the workers need for one step."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    """Tokens per request, each > 0."""
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    """Draft tokens to verify; −1 = known to the worker only."""
    scheduled_encoder_inputs: dict[str, list[int]]
    finished_req_ids: set[str]
    """Requests that ended since the last step; the workers forget them."""
    free_encoder_mm_hashes: list[str]
    encoder_input_updates: dict[str, dict[int, Any]] = field(default_factory=dict)  # opaque media items
    scheduled_encoder_input_stats: ScheduledEncoderInputStats | None = None
    preempted_req_ids: set[str] | None = None
    has_structured_output_requests: bool = False
    pending_structured_output_tokens: bool = False
    """A structured request waits for a token in flight: its mask can be made only after that token arrived."""
    num_invalid_spec_tokens: dict[str, int] | None = None
    kv_connector_metadata: KVConnectorMetadata | None = None
    has_sync_kv_loads: bool = False
    """Some request of this step needs its load to end before the forward."""
    aux_output_connector_metadata: Any = None  # an auxiliary connector's own record
    ec_connector_metadata: Any = None  # an encoder cache connector's own record
    ec_manager_metadata: Any = None  # an encoder cache manager's own record
    new_block_ids_to_zero: list[int] | None = None
    kv_cache_block_copies: list[tuple[int, int]] | None = None
    """(source, target) block ids; copied after zeroing and before the forward."""
    kv_connector_block_state: KVConnectorBlockState | None = None
    """Set only while the connector builds its metadata; None when workers see this object."""
    num_spec_tokens_to_schedule: int = 0
    num_common_prefix_blocks: list[int] = field(default_factory=list)
    """Always empty; kept for readers of older releases."""
    skip_drafts: bool = False
    """No scheduled request can use drafts made after this step."""

    @classmethod
    def make_empty(cls) -> SchedulerOutput:
        """A step without requests."""
        return cls([], CachedRequestData.make_empty(), {}, 0, {}, {}, set(), [])


@dataclass
class GrammarOutput:
    """Token masks of the structured requests of one step."""

    structured_output_request_ids: list[str]
    """Row order of the mask; a request with n drafts has n + 1 rows."""
    grammar_bitmask: npt.NDArray[np.int32]
    """``[rows, ceil(vocab / 32)]``, bit 1 = allowed."""
    num_acceptable_drafts: dict[str, int] | None = None
    """Drafts per request that the grammar allows, where some are refused."""


__all__ = [
    "CachedRequestData",
    "GrammarOutput",
    "KVConnectorBlockState",
    "NewRequestData",
    "ScheduledEncoderInputStats",
    "SchedulerOutput",
]
