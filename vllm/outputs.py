"""What callers get back: completions, embeddings, errors. Layer: L1."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from vllm.exceptions import GenerationError, RetryableRequestError, VLLMError, VLLMValidationError
from vllm.logger import init_logger
from vllm.logprobs import LogprobsOnePosition, PromptLogprobs, SampleLogprobs
from vllm.lora.request import LoRARequest

if TYPE_CHECKING:
    import numpy as np
    import torch

logger = init_logger(__name__)

_Pooled = TypeVar("_Pooled")


class RequestError(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why one request ended in an error: a stable code, a message, and whether the same request may succeed later."""

    code: str
    message: str
    retryable: bool = False

    def to_exception(self) -> VLLMError:
        """The exception that the front end raises for it."""
        if self.code in CLIENT_ERROR_CODES:
            return VLLMValidationError(self.message, parameter=CLIENT_ERROR_CODES[self.code])
        return RetryableRequestError(self.message) if self.retryable else GenerationError(self.message)


# Codes that mean: the request itself was at fault; and the field at fault, where the code alone tells.
CLIENT_ERROR_CODES = {
    "invalid_request": None,
    "invalid_grammar": "structured_outputs",
    "grammar_too_complex": "structured_outputs",
    "validation_error": "structured_outputs",
    "kv_cache_too_small": None,
}


class SamplingMask(msgspec.Struct, omit_defaults=True):
    """Token ids that could have been sampled at one position."""

    token_ids: list[int]


class WeightVersionSpan(msgspec.Struct, omit_defaults=True):
    """Output tokens [start, end) that were computed with one version of the weights."""

    version: str
    start: int
    end: int


@dataclass
class CompletionOutput:
    """One sampled sequence. `cumulative_logprob` and `logprobs` are None unless asked for."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: SampleLogprobs | None
    routed_experts: np.ndarray | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    sampling_mask: list[SamplingMask] | None = None
    # Counters of speculative decoding; their record belongs to a higher layer.
    spec_decode_metrics: Any = None
    weight_versions: list[WeightVersionSpan] | None = None

    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


class RequestOutput:
    """The state of a request: its prompt and one `CompletionOutput` per sample."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int] | None,
        prompt_logprobs: PromptLogprobs | None,
        outputs: list[CompletionOutput],
        finished: bool,
        # Times and counts of the request; their record belongs to a higher layer.
        metrics: Any = None,
        lora_request: LoRARequest | None = None,
        encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None,
        num_cached_tokens: int | None = None,
        num_cache_creation_tokens: int | None = None,
        *,
        # What a connector answers is known to the connector only.
        kv_transfer_params: dict[str, Any] | None = None,
        ec_transfer_params: dict[str, Any] | None = None,
        prompt_token_id_logprobs: Any = None,
        # `num_cached_tokens` by tier.
        cached_tokens_by_source: dict[str, int] | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            logger.warning_once("RequestOutput ignores unknown arguments: %s", ", ".join(sorted(unknown)))
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.metrics = metrics
        self.lora_request = lora_request
        self.encoder_prompt = encoder_prompt
        self.encoder_prompt_token_ids = encoder_prompt_token_ids
        self.num_cached_tokens = num_cached_tokens
        self.num_cache_creation_tokens = num_cache_creation_tokens
        self.kv_transfer_params = kv_transfer_params
        self.ec_transfer_params = ec_transfer_params
        self.prompt_token_id_logprobs = prompt_token_id_logprobs
        self.cached_tokens_by_source = cached_tokens_by_source

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Take in a later output: joined to this one if `aggregate` (deltas), else replacing it sample by sample."""
        self.finished |= next_output.finished
        self.kv_transfer_params = next_output.kv_transfer_params or self.kv_transfer_params
        self.ec_transfer_params = next_output.ec_transfer_params or self.ec_transfer_params
        if self.prompt_token_id_logprobs is None:
            self.prompt_token_id_logprobs = next_output.prompt_token_id_logprobs
        if self.num_cached_tokens is None:
            self.num_cached_tokens = next_output.num_cached_tokens
            self.cached_tokens_by_source = next_output.cached_tokens_by_source
        if self.num_cache_creation_tokens is None:
            self.num_cache_creation_tokens = next_output.num_cache_creation_tokens
        if next_output.metrics is not None:
            self.metrics = next_output.metrics
        positions = {output.index: position for position, output in enumerate(self.outputs)}
        for output in next_output.outputs:
            position = positions.get(output.index)
            if position is None:
                self.outputs.append(output)
            elif aggregate:
                _join(self.outputs[position], output)
            else:
                self.outputs[position] = output

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"RequestOutput({fields})"


def _join(present: CompletionOutput, following: CompletionOutput) -> None:
    """Append the delta `following` to `present`."""
    present.text += following.text
    if not isinstance(present.token_ids, MutableSequence):
        present.token_ids = list(present.token_ids)
    present.token_ids.extend(following.token_ids)
    if following.logprobs:
        entries: SampleLogprobs = following.logprobs
        if present.logprobs is None:
            present.logprobs = entries
        else:
            present.logprobs.extend(entry for entry in entries)
    if following.sampling_mask:
        present.sampling_mask = [*(present.sampling_mask or []), *following.sampling_mask]
    present.cumulative_logprob = following.cumulative_logprob
    present.finish_reason = following.finish_reason
    present.stop_reason = following.stop_reason
    present.spec_decode_metrics = following.spec_decode_metrics or present.spec_decode_metrics
    present.weight_versions = following.weight_versions or present.weight_versions


@dataclass
class PoolingOutput:
    """The raw result of a pooling request: a tensor whose shape depends on the task."""

    data: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and bool((self.data == other.data).all())

    __hash__ = None  # type: ignore[assignment]


class PoolingRequestOutput(Generic[_Pooled]):
    """The result of a pooling request; `error` tells why there is none."""

    def __init__(
        self,
        request_id: str,
        outputs: _Pooled,
        prompt_token_ids: list[int],
        num_cached_tokens: int,
        finished: bool,
        *,
        error: RequestError | None = None,
        late_chunking: Any = None,
    ) -> None:
        self.request_id = request_id
        self.outputs = outputs
        self.prompt_token_ids = prompt_token_ids
        self.num_cached_tokens = num_cached_tokens
        self.finished = finished
        self.error = error
        self.late_chunking = late_chunking

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"


def _rebuild(base: PoolingRequestOutput[PoolingOutput], target: type[Any], outputs: Any) -> Any:
    return target(
        request_id=base.request_id,
        outputs=outputs,
        prompt_token_ids=base.prompt_token_ids,
        num_cached_tokens=base.num_cached_tokens,
        finished=base.finished,
        error=base.error,
        late_chunking=base.late_chunking,
    )


@dataclass
class EmbeddingOutput:
    """An embedding vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the vector."""
        return len(self.embedding)

    @staticmethod
    def from_base(base: PoolingOutput) -> EmbeddingOutput:
        """From a one-dimensional tensor. Raises ValueError for another shape."""
        if base.data.ndim != 1:
            raise ValueError(f"An embedding must be one vector, got shape {tuple(base.data.shape)}")
        return EmbeddingOutput(base.data.tolist())


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput | None]):
    """A request's embedding."""

    @staticmethod
    def from_base(base: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
        """The same request with its tensor read as an embedding."""
        outputs = None if base.error is not None else EmbeddingOutput.from_base(base.outputs)
        result: EmbeddingRequestOutput = _rebuild(base, EmbeddingRequestOutput, outputs)
        return result


@dataclass
class ClassificationOutput:
    """Probability per class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)

    @staticmethod
    def from_base(base: PoolingOutput) -> ClassificationOutput:
        """From a one-dimensional tensor. Raises ValueError for another shape."""
        if base.data.ndim != 1:
            raise ValueError(f"Class probabilities must be one vector, got shape {tuple(base.data.shape)}")
        return ClassificationOutput(base.data.tolist())


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput | None]):
    """A request's class probabilities."""

    @staticmethod
    def from_base(base: PoolingRequestOutput[PoolingOutput]) -> ClassificationRequestOutput:
        """The same request with its tensor read as probabilities."""
        outputs = None if base.error is not None else ClassificationOutput.from_base(base.outputs)
        result: ClassificationRequestOutput = _rebuild(base, ClassificationRequestOutput, outputs)
        return result


@dataclass
class ScoringOutput:
    """Similarity of a pair."""

    score: float

    @staticmethod
    def from_base(base: PoolingOutput) -> ScoringOutput:
        """From a tensor with one element. Raises ValueError for another size."""
        if base.data.numel() != 1:
            raise ValueError(f"A score must be one number, got shape {tuple(base.data.shape)}")
        return ScoringOutput(base.data.item())


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput | None]):
    """A request's score."""

    @staticmethod
    def from_base(base: PoolingRequestOutput[PoolingOutput]) -> ScoringRequestOutput:
        """The same request with its tensor read as a score."""
        outputs = None if base.error is not None else ScoringOutput.from_base(base.outputs)
        result: ScoringRequestOutput = _rebuild(base, ScoringRequestOutput, outputs)
        return result


__all__ = [
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LogprobsOnePosition",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestError",
    "RequestOutput",
    "SamplingMask",
    "ScoringOutput",
    "ScoringRequestOutput",
    "WeightVersionSpan",
]
