"""What a step's tokens do to one request, and the message that tells the client.

Owns counters of drafts and placeholders, stopping, and the outgoing message.  Must not know queues or blocks.
Layer: L5 (scheduler).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.outputs import RequestError
from vllm.v1.core.sched.in_flight import StepRecord
from vllm.v1.core.sched.stop import check_stop
from vllm.v1.kv_connector_types import KVConnectorStats
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request


@dataclass(slots=True)
class Drafted:
    """Drafts of one request in one step."""

    num_drafts: int
    num_accepted: int


def settle_counters(
    request: Request, record: StepRecord, num_scheduled: int, num_tokens: int
) -> Drafted | None:
    """The step of ``num_scheduled`` tokens has returned ``num_tokens`` for the request: correct its counters.

    Refused drafts were counted as computed when they were scheduled.
    """
    request.num_in_flight_tokens = max(0, request.num_in_flight_tokens - num_scheduled)
    if request.request_id in record.partial:
        return None
    drafts = record.output.scheduled_spec_decode_tokens.get(request.request_id, ())
    if request.num_output_placeholders > 0:
        request.num_output_placeholders -= 1 + len(drafts)
    if not drafts or num_tokens == 0:
        return None
    refused = len(drafts) + 1 - num_tokens
    request.num_computed_tokens -= refused
    return Drafted(len(drafts), num_tokens - 1)


def append_until_stop(request: Request, token_ids: list[int], max_model_len: int) -> tuple[list[int], bool]:
    """Append tokens one by one until the request stops.  Returns those that were kept, and whether it stopped."""
    for index, token_id in enumerate(token_ids):
        request.append_output_token_ids(token_id)
        if check_stop(request, max_model_len):
            return token_ids[: index + 1], True
    return token_ids, False


def make_output(
    request: Request, token_ids: list[int], runner: ModelRunnerOutput, row: int | None
) -> EngineCoreOutput:
    """The message about one request, without what the end of a request adds."""
    output = EngineCoreOutput(request.request_id, token_ids, trace_headers=request.trace_headers)
    if token_ids and request.events:
        # Without a token the message may not be sent: a prefill chunk must not take the events away with it.
        output.events = request.take_events()
    if token_ids and request.prefill_stats is not None:
        output.prefill_stats = request.take_prefill_stats()
    if row is not None:
        if runner.logprobs is not None and request.wants_logprobs and token_ids:
            rows = runner.logprobs.slice_request(row, len(token_ids))
            output.new_logprobs = _logprobs_of(request, rows)
        if runner.sampling_masks is not None and token_ids:
            output.new_sampling_mask = runner.sampling_masks.slice_request(row, len(token_ids))
        if runner.pooler_output:
            output.pooling_output = runner.pooler_output[row]
    if runner.prompt_logprobs_dict:
        output.new_prompt_logprobs_tensors = runner.prompt_logprobs_dict.get(request.request_id)
    if runner.prompt_token_id_logprobs_dict:
        output.prompt_token_id_logprobs = runner.prompt_token_id_logprobs_dict.get(request.request_id)
    return output


def _logprobs_of(request: Request, rows: LogprobsLists) -> LogprobsLists:
    """As much of the rows as is the request's: a neighbour may have asked for more."""
    count = None if request.sampling_params is None else request.sampling_params.num_logprobs
    return rows if count is None or count < 0 else rows.first_columns(1 + count)


def is_worth_sending(output: EngineCoreOutput) -> bool:
    """False for a message that says nothing, such as that of a prefill chunk."""
    return (
        bool(output.new_token_ids)
        or output.finish_reason is not None
        or output.pooling_output is not None
        or output.new_prompt_logprobs_tensors is not None
        or output.prompt_token_id_logprobs is not None
    )


def add_end(
    output: EngineCoreOutput, request: Request, params: dict[str, Any] | None, error: RequestError | None
) -> None:
    """Complete the last message of a request; ``params`` are the connector's."""
    output.finish_reason = request.get_finished_reason()
    output.stop_reason = request.stop_reason
    output.kv_transfer_params = params
    output.spec_decode_metrics = request.spec_decode_metrics
    output.error = error
    if request.prefill_stats is not None:
        output.prefill_stats = request.take_prefill_stats()


def combine_connector_stats(
    worker: KVConnectorStats | None, connector: KVConnectorBase_V1 | None
) -> dict[str, Any] | None:
    """The payload of both halves' statistics; None if there are none."""
    own = None if connector is None else connector.get_kv_connector_stats()
    if worker is not None and own is not None:
        worker = worker.aggregate(own)
    combined = worker if worker is not None else own
    return None if combined is None or combined.is_empty() else combined.to_dict()
