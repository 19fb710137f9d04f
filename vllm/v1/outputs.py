"""What a model runner returns for one step: token ids, log probabilities, connector reports.

Owns the records between L6 runners and the scheduler.  Tensors appear as opaque values only; this layer never
imports torch.  Must not know how anything in here was computed.  Layer: L2 (values).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm.distributed.kv_event_types import KVConnectorKVEvents
from vllm.v1.kv_connector_types import KVConnectorStats, KVConnectorWorkerMetadata

# A ``torch.Tensor``; opaque because nothing up to L5 may depend on torch.
Tensor = Any


class LogprobsLists(NamedTuple):
    """Log probabilities of sampled tokens on the host.

    Rows are sampled positions over all requests of a step; ``k`` is the largest number of alternatives asked for.
    ``cu_num_generated_tokens`` gives the first row of each request where requests may have several rows (drafts);
    where it is None, row i belongs to request i.
    """

    logprob_token_ids: npt.NDArray[np.int32]
    """``[rows, k + 1]``; column 0 is the sampled token."""
    logprobs: npt.NDArray[np.float32]
    """``[rows, k + 1]``"""
    sampled_token_ranks: npt.NDArray[np.int32]
    """``[rows]``, 1 = most likely"""
    cu_num_generated_tokens: list[int] | None = None

    def slice_request(self, req_idx: int, num_positions: int) -> "LogprobsLists":
        """The first ``num_positions`` rows of request ``req_idx``."""
        cumulative = self.cu_num_generated_tokens
        start = req_idx if cumulative is None else cumulative[req_idx]
        end = start + num_positions
        return LogprobsLists(
            self.logprob_token_ids[start:end],
            self.logprobs[start:end],
            self.sampled_token_ranks[start:end],
            None,
        )

    def first_columns(self, num_columns: int) -> "LogprobsLists":
        """The same rows, cut behind ``num_columns`` columns."""
        return self._replace(
            logprob_token_ids=self.logprob_token_ids[:, :num_columns], logprobs=self.logprobs[:, :num_columns]
        )


class LogprobsTensors(NamedTuple):
    """Log probabilities as tensors, with the shapes of :class:`LogprobsLists`."""

    logprob_token_ids: Tensor
    logprobs: Tensor
    selected_token_ranks: Tensor
    cu_num_generated_tokens: list[int] | None = None
    cu_num_generated_tokens_tensor: Tensor | None = None

    def tolists(self, cu_num_generated_tokens: list[int] | None = None) -> LogprobsLists:
        """The same numbers on the host (blocks until the device has produced them)."""
        cumulative = (
            cu_num_generated_tokens if cu_num_generated_tokens is not None else self.cu_num_generated_tokens
        )
        return LogprobsLists(
            self.logprob_token_ids.cpu().numpy(),
            self.logprobs.cpu().numpy(),
            self.selected_token_ranks.cpu().numpy(),
            cumulative,
        )

    def to_cpu_nonblocking(self) -> "LogprobsTensors":
        """Start the copy to the host; the caller synchronises before it reads."""
        return LogprobsTensors(
            self.logprob_token_ids.to("cpu", non_blocking=True),
            self.logprobs.to("cpu", non_blocking=True),
            self.selected_token_ranks.to("cpu", non_blocking=True),
            self.cu_num_generated_tokens,
            self.cu_num_generated_tokens_tensor,
        )

    def filter(self, mask: Tensor) -> "LogprobsTensors":
        """Only the rows where ``mask`` is True."""
        return LogprobsTensors(
            self.logprob_token_ids[mask], self.logprobs[mask], self.selected_token_ranks[mask], None, None
        )


class SamplingMaskLists(NamedTuple):
    """Which tokens each sampled position was allowed to choose from.

    ``token_ids`` is flat; row i is ``token_ids[offsets[i]:offsets[i + 1]]``.  Without ``offsets`` there is one row.
    """

    token_ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64] | None = None
    cu_num_generated_tokens: list[int] | None = None

    def slice_request(self, req_idx: int, num_positions: int) -> "SamplingMaskLists":
        """The first ``num_positions`` rows of request ``req_idx``, with offsets starting at 0."""
        if self.offsets is None:
            return self
        cumulative = self.cu_num_generated_tokens
        start = req_idx if cumulative is None else cumulative[req_idx]
        bounds = self.offsets[start : start + num_positions + 1]
        return SamplingMaskLists(self.token_ids[bounds[0] : bounds[-1]], bounds - bounds[0], None)


@dataclass
class SamplerOutput:
    """What the sampler returns, still on the device."""

    sampled_token_ids: Tensor
    """``[requests, 1 + drafts]``; −1 marks rejected drafts."""
    logprobs_tensors: LogprobsTensors | None


@dataclass
class KVConnectorOutput:
    """Report of the worker half of a KV connector for one step, already combined over all ranks."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: KVConnectorStats | None = None
    kv_cache_events: KVConnectorKVEvents | None = None
    kv_connector_worker_meta: KVConnectorWorkerMetadata | None = None
    invalid_block_ids: set[int] = field(default_factory=set)
    """Blocks whose load failed; their bytes must not be used."""
    failed_recving: set[str] = field(default_factory=set)
    """Requests whose load failed; also listed in ``finished_recving``."""
    expected_finished_count: int = 0
    """Reports per request that make a transfer complete; 0 leaves the aggregator's number unchanged."""

    def is_empty(self) -> bool:
        """True if the scheduler has nothing to do for this report."""
        return (
            not self.finished_sending
            and not self.finished_recving
            and not self.kv_connector_stats
            and not self.kv_cache_events
            and not self.kv_connector_worker_meta
            and not self.invalid_block_ids
            and not self.failed_recving
        )


@dataclass
class ModelRunnerOutput:
    """Result of one step for all scheduled requests."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    """Per request the new tokens; an empty inner list for a prefill chunk."""
    logprobs: LogprobsLists | None = None
    prompt_logprobs_dict: dict[str, LogprobsTensors | None] = field(default_factory=dict)
    prompt_token_id_logprobs_dict: dict[str, Any] = field(default_factory=dict)  # passed through unread
    pooler_output: list[Tensor | None] | None = None
    kv_connector_output: KVConnectorOutput | None = None
    ec_connector_output: Any = None  # the record of an encoder cache connector, passed through unread
    num_nans_in_logits: dict[str, int] | None = None
    cudagraph_stats: Any = None  # passed through to the metrics unread
    aux_output_connector_output: Any = None  # passed through unread
    sampling_masks: SamplingMaskLists | None = None

    @staticmethod
    def with_kv_conn_output_only(kv_connector_output: KVConnectorOutput | None) -> "ModelRunnerOutput":
        """An output without requests that carries only a connector report (the shared empty one if there is none)."""
        if kv_connector_output is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=kv_connector_output)


def with_kv_conn_output_only(kv_connector_output: KVConnectorOutput | None) -> ModelRunnerOutput:
    """See :meth:`ModelRunnerOutput.with_kv_conn_output_only`."""
    return ModelRunnerOutput.with_kv_conn_output_only(kv_connector_output)


def with_ec_conn_output_only(ec_connector_output: Any) -> ModelRunnerOutput:
    """An output without requests that carries only an encoder cache connector's report."""
    if ec_connector_output is None:
        return EMPTY_MODEL_RUNNER_OUTPUT
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, ec_connector_output=ec_connector_output)


def with_ec_conn_output(output: ModelRunnerOutput, ec_connector_output: Any) -> ModelRunnerOutput:
    """``output`` with the report added; the shared empty output is never changed."""
    if ec_connector_output is None:
        return output
    if output is EMPTY_MODEL_RUNNER_OUTPUT:
        return with_ec_conn_output_only(ec_connector_output)
    output.ec_connector_output = ec_connector_output
    return output


class AsyncModelRunnerOutput(ABC):
    """The promise of a :class:`ModelRunnerOutput` whose tokens are still being copied to the host."""

    @abstractmethod
    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copy and return the output.  Called exactly once."""

    @abstractmethod
    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """The connector's report, available without waiting; None if there is none."""


@dataclass
class DraftTokenIds:
    """Draft tokens proposed after a step."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput(req_ids=[], req_id_to_index={})
"""Shared by all empty steps; never to be changed."""

__all__ = [
    "EMPTY_MODEL_RUNNER_OUTPUT",
    "AsyncModelRunnerOutput",
    "DraftTokenIds",
    "KVConnectorOutput",
    "KVConnectorWorkerMetadata",
    "LogprobsLists",
    "LogprobsTensors",
    "ModelRunnerOutput",
    "SamplerOutput",
    "SamplingMaskLists",
    "with_ec_conn_output",
    "with_ec_conn_output_only",
    "with_kv_conn_output_only",
]
