"""How a request wants its tokens chosen: parameters, their checks, and what generation defaults add. Layer: L1.

Knows nothing of requests or models beyond what `verify` is handed.
"""

from __future__ import annotations

import copy
from enum import IntEnum
from typing import Any, cast

import msgspec

from vllm import sampling_checks as checks
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.sampling_checks import validate_thinking_token_budget

logger = init_logger(__name__)

SAMPLING_EPS = 1e-5
MIN_TEMPERATURE = 1e-2


class SamplingType(IntEnum):
    """How the next token is drawn."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RequestOutputKind(IntEnum):
    """What each output of a stream holds: everything so far, what is new, or nothing until the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True):
    """Exactly one constraint on the text, and options of JSON constraints."""

    # A JSON schema, as text or as the object itself.
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        checks.check_structured_outputs(self.constraints())
        checks.check_optional_text("structured_outputs.whitespace_pattern", self.whitespace_pattern)
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            checks.check_flag(f"structured_outputs.{name}", getattr(self, name))

    def constraints(self) -> dict[str, object]:
        """The constraints that are given, by field name; one entry once the object is constructed."""
        given = {
            "json": self.json,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object,
            "structural_tag": self.structural_tag,
        }
        return {name: value for name, value in given.items() if value is not None}


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True):
    """End a request whose output repeats: a pattern of `min_pattern_size` to `max_pattern_size` tokens, `min_count` times."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        checks.check_repetition_detection(self.max_pattern_size, self.min_pattern_size, self.min_count)


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True):
    """Parameters of one generation request. Bad values raise `VLLMValidationError` naming the field.

    After construction the parameters are consistent: a greedy request has neutral top_p, top_k and min_p; `stop` and
    `stop_token_ids` are lists; `logit_bias` has integer keys and values within ±100.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    # Options of watermarking, which this engine refuses.
    watermarking: Any = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: list[int] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    # Options for connectors and plugins: any JSON values.
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None

    # Computed: characters a stop string needs held back.
    output_text_buffer_length: int = 0
    _eos_token_id: int | None = None
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    _bad_words_token_ids: list[list[int]] | None = None
    _scores_prompt: bool = False
    _completes_prompt: bool = False

    # Further construction.

    @staticmethod
    def from_optional(**given: Any) -> SamplingParams:
        """Like the constructor, but a None stands for the default. Unknown names raise TypeError."""
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def clone(self) -> SamplingParams:
        """An independent copy; the object itself if `skip_clone` says that nobody else uses it."""
        return self if self.skip_clone else copy.deepcopy(self)

    def __post_init__(self) -> None:
        checks.check_flags(self)
        self._normalise()
        checks.check_numbers(self)
        checks.check_tokens_and_texts(self)
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise VLLMValidationError(
                "structured_outputs must be StructuredOutputsParams", parameter="structured_outputs"
            )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise VLLMValidationError(
                f"output_kind must be a RequestOutputKind, got {self.output_kind!r}",
                parameter="output_kind",
                value=self.output_kind,
            )
        if self.stop and not self.include_stop_str_in_output:
            self.output_text_buffer_length = max(map(len, self.stop)) - 1
        if self.temperature < SAMPLING_EPS:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                raise VLLMValidationError(
                    "n must be 1 when using greedy sampling", parameter="n", value=self.n
                )
        elif self.temperature < MIN_TEMPERATURE:
            logger.warning_once(
                "temperature below %s is raised to it, since smaller values overflow, and takes the likeliest token",
                MIN_TEMPERATURE,
            )
            # As good as greedy was asked for; logits that lie close together would still be drawn from at the minimum.
            self.temperature, self.top_k = MIN_TEMPERATURE, 1
        self._all_stop_token_ids.update(cast(list[int], self.stop_token_ids))
        if self.skip_reading_prefix_cache is None:
            wants_prompt = self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None
            self.skip_reading_prefix_cache = wants_prompt

    def _normalise(self) -> None:
        if self.seed == -1:
            self.seed = None
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop_token_ids = [] if self.stop_token_ids is None else list(self.stop_token_ids)
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        if self.logit_bias is not None:
            self.logit_bias = checks.normal_logit_bias(self.logit_bias)
        self.thinking_token_budget = validate_thinking_token_budget(self.thinking_token_budget)

    def update_from_generation_config(
        self, generation_config: dict[str, Any], eos_token_id: int | None = None
    ) -> None:
        """Add the end tokens of the model: `eos_token_id` ends the output, further ones act like `stop_token_ids`."""
        if not self.ignore_eos:
            self._eos_token_id = eos_token_id
        if eos_token_id is not None:
            self._all_stop_token_ids.add(eos_token_id)
        stated = generation_config.get("eos_token_id")
        if stated is None:
            return
        further = {stated} if isinstance(stated, int) else set(stated)
        further.discard(eos_token_id)
        self._all_stop_token_ids.update(further)
        if further and not self.ignore_eos:
            self.stop_token_ids = sorted(further.union(self.stop_token_ids or ()))

    def update_from_tokenizer(self, tokenizer: Any) -> None:
        """Turn `bad_words` into token sequences, both at the start of a word and inside one."""
        if not self.bad_words:
            return
        self._bad_words_token_ids = checks.bad_words_to_token_ids(self.bad_words, tokenizer)

    def score_prompt(self, completes_prompt: bool = False) -> None:
        """Only the prompt is asked about: what is made is told to nobody, or (`completes_prompt`) as the prompt's last token."""
        self._scores_prompt, self._completes_prompt = True, completes_prompt

    # What the front end reads.

    @property
    def scores_prompt(self) -> bool:
        """Whether what is made is no output: see `score_prompt`."""
        return self._scores_prompt

    @property
    def completes_prompt(self) -> bool:
        """Whether it is the prompt's last token."""
        return self._completes_prompt

    # What the sampler and the scheduler read.

    @property
    def sampling_type(self) -> SamplingType:
        """Greedy, random, or random with a seed of its own."""
        if self.temperature < SAMPLING_EPS:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends the output; None with `ignore_eos` or before `update_from_generation_config`."""
        return self._eos_token_id

    @property
    def all_stop_token_ids(self) -> set[int]:
        """Every token that could end the output; masked while `min_tokens` is not reached."""
        return self._all_stop_token_ids

    @property
    def bad_words_token_ids(self) -> list[list[int]] | None:
        """Token sequences that must not appear; None without `bad_words`."""
        return self._bad_words_token_ids

    @property
    def num_logprobs(self) -> int | None:
        """Entries reported per output token besides the token itself; None if no log probabilities are asked for."""
        if self.logprob_token_ids:
            return len(self.logprob_token_ids)
        return self.logprobs

    # Checks against the model.

    # The configs and the tokenizer may be partial records; only the fields named below are read.
    def verify(
        self, model_config: Any, speculative_config: Any, structured_outputs_config: Any, tokenizer: Any
    ) -> None:
        """Check against the model: ids within its vocabulary, log probabilities within `max_logprobs`, features that exist.

        Raises VLLMValidationError naming the field and the value.
        """
        vocab = model_config.get_vocab_size()
        checks.check_logprob_limits(self, model_config.max_logprobs, vocab)
        checks.check_token_ids(self, vocab)
        checks.check_features(self, model_config, speculative_config, tokenizer)
        if self.structured_outputs is not None and structured_outputs_config is not None:
            options = self.structured_outputs
            options.disable_any_whitespace |= structured_outputs_config.disable_any_whitespace
            options.disable_additional_properties |= structured_outputs_config.disable_additional_properties


class BeamSearchParams(msgspec.Struct, omit_defaults=True):
    """Parameters of a beam search."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    # As in SamplingParams.
    watermarking: Any = None
    allowed_token_ids: list[int] | None = None


__all__ = [
    "BeamSearchParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
    "StructuredOutputsParams",
    "validate_thinking_token_budget",
]
