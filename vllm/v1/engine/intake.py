"""From a caller's request to messages for the core, for both engines.  Layer L7.

Owns the order: check and tokenise, admit, give ids, split n > 1, follow in the output processor. Either all children of a
request are followed when it is sent, or none. Must not know how messages are sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.admission import AdmissionControl
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_collector import RequestOutputCollector
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.messages import EngineCoreRequest

# Children of one request followed at a time; each takes some tenths of a millisecond.
FOLLOW_SLICE = 32


class RequestIntake:
    """`prepare` may run in another thread; everything else belongs to the engine's own."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        tokenizer: Any | None,
        log_stats: bool,
        packs_wide_logprobs: bool = False,
    ) -> None:
        self.input_processor = InputProcessor(vllm_config, tokenizer)
        self.output_processor = OutputProcessor(
            tokenizer,
            log_stats=log_stats,
            stream_interval=vllm_config.scheduler_config.stream_interval,
            packs_wide_logprobs=packs_wide_logprobs,
        )
        self.admission = AdmissionControl(vllm_config.scheduler_config)

    def prepare(
        self, request_id: str, prompt: Any, params: SamplingParams | PoolingParams, **options: Any
    ) -> tuple[str | None, EngineCoreRequest]:
        """Text and request; a prompt that is an `EngineCoreRequest` already is taken as it is."""
        if isinstance(prompt, EngineCoreRequest):
            if prompt.request_id != request_id:
                raise VLLMValidationError(
                    f"request_id {request_id!r} differs from that of the request, {prompt.request_id!r}",
                    parameter="request_id",
                )
            text, request = None, prompt
        else:
            text, request = self.input_processor.process_inputs(request_id, prompt, params, **options)
        self.input_processor.assign_request_id(request)
        return text, request

    def follow(
        self, text: str | None, request: EngineCoreRequest, queue: RequestOutputCollector | None
    ) -> list[EngineCoreRequest]:
        """Admit the request and follow it; returns the messages to send. Raises as `follow_in_slices` does."""
        return [message for part in self.follow_in_slices(text, request, queue) for message in part]

    def follow_in_slices(
        self, text: str | None, request: EngineCoreRequest, queue: RequestOutputCollector | None
    ) -> Iterator[list[EngineCoreRequest]]:
        """As `follow`, some children at a time: a loop may serve others in between. Send when all are followed.

        Ends early if the request was aborted in between: then there is nothing to send (`OutputProcessor.is_followed`).
        Raises QueueOverflowError or MaxQueuedTokensError if too much waits, VLLMValidationError for an id in use.
        """
        params = request.sampling_params
        children = params.n if params is not None else 1
        self._admit(request, children)
        if self.output_processor.has_request(request.request_id):
            raise VLLMValidationError(
                f"request_id {request.external_req_id!r} is in use by an unfinished request",
                parameter="request_id",
                value=request.external_req_id,
            )
        if children == 1:
            self.output_processor.add_request(request, text, None, 0, queue)
            yield [request]
            return
        parent = ParentRequest(request)
        for start in range(0, children, FOLLOW_SLICE):
            messages = []
            for index in range(start, min(start + FOLLOW_SLICE, children)):
                child = _child(request, parent, index)
                self.output_processor.add_request(child, text, parent, index, queue)
                messages.append(child)
            yield messages
            if not self.output_processor.is_followed(request.request_id):
                return

    def _admit(self, request: EngineCoreRequest, children: int) -> None:
        if not self.admission.is_limited:
            return
        processor = self.output_processor
        new_tokens = children * len(request.prompt_token_ids or ())
        self.admission.check(
            processor.get_num_queued_requests(), processor.get_num_queued_tokens(), children, new_tokens
        )


def _child(request: EngineCoreRequest, parent: ParentRequest, index: int) -> EngineCoreRequest:
    """A copy of the request for child `index`; the prompt is shared, not copied."""
    values = {field: getattr(request, field) for field in request.__struct_fields__}
    values["request_id"], values["sampling_params"] = parent.get_child_info(index)
    return EngineCoreRequest(**values)
