"""`LLM`: the engine for programs that hand over all their prompts and wait for all the answers. Layer: L8."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from vllm.engine.arg_utils import TABLE, EngineArgs
from vllm.entrypoints.beam_search import BeamSearchOutput, beam_search, check_beam_params
from vllm.entrypoints.chat_utils import (
    ChatOptions,
    ContentFormatOption,
    load_chat_template,
    render_chat,
    resolve_template,
)
from vllm.exceptions import VLLMNotImplementedError, VLLMValidationError
from vllm.inputs import PromptType, TokensPrompt
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Metric

logger = init_logger(__name__)

PromptOrPrompts = PromptType | Sequence[PromptType]
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """An engine and its tokenizer. Calls are synchronous and may not overlap; settings are those of `EngineArgs`.

    Raises ValueError or TypeError for settings that cannot work.
    """

    def __init__(
        self,
        model: str,
        *,
        runner: str = "auto",
        convert: str = "auto",
        tokenizer: str | None = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        allowed_local_media_path: str = "",
        tensor_parallel_size: int = 1,
        dtype: Any = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        chat_template: str | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = 0.92,
        cpu_offload_gb: float = 0,
        enforce_eager: bool = False,
        hf_overrides: Any = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        pooler_config: Any = None,
        structured_outputs_config: Any = None,
        kv_cache_memory_bytes: int | None = None,
        compilation_config: Any = None,
        logits_processors: list[Any] | None = None,
        **engine_settings: Any,
    ) -> None:
        named = {name: value for name, value in locals().items() if name in TABLE}
        named["hf_overrides"] = hf_overrides or {}
        named["compilation_config"] = compilation_config or {}
        engine_settings.setdefault("disable_log_stats", True)
        self._connect(EngineArgs(**named, **engine_settings), chat_template)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """An LLM from flags."""
        llm = cls.__new__(cls)
        llm._connect(engine_args, None)
        return llm

    def _connect(self, engine_args: EngineArgs, chat_template: str | None) -> None:
        self.chat_template = load_chat_template(chat_template)
        self.llm_engine = LLMEngine.from_engine_args(engine_args, usage_context=UsageContext.LLM_CLASS)
        model_config = self.llm_engine.model_config
        assert model_config is not None
        self.model_config = model_config
        self._ids = itertools.count()
        self._order: list[str] = []
        self._is_shut_down = False

    # --- generation ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptOrPrompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts.

        A prompt is a text, token ids or a prompt mapping; parameters, adapters and priorities are one for all or one per
        prompt. Raises VLLMValidationError naming the field at fault; then none of the prompts is answered. RuntimeError
        while the engine sleeps.
        """
        self.enqueue(
            prompts,
            sampling_params,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self.wait_for_completion(use_tqdm=use_tqdm)

    def enqueue(
        self,
        prompts: PromptOrPrompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts without waiting; the ids of their requests. `wait_for_completion` gives the answers."""
        if self._is_shut_down:
            raise RuntimeError("this LLM was shut down")
        self.llm_engine.check_running()
        if mm_processor_kwargs:
            raise VLLMNotImplementedError("mm_processor_kwargs: this engine takes text only")
        items = _prompt_list(prompts)
        params = _one_each(
            "sampling_params", sampling_params or self.get_default_sampling_params(), len(items)
        )
        adapters = _one_each("lora_request", lora_request, len(items))
        priorities = _one_each("priority", 0 if priority is None else priority, len(items))
        added: list[str] = []
        try:
            for item in zip(items, params, adapters, priorities, strict=True):
                added.append(self._add(*item, tokenization_kwargs))
        except Exception:
            self.llm_engine.abort_request(added)
            raise
        self._order += added
        return added

    def _add(
        self,
        prompt: PromptType,
        params: SamplingParams,
        lora_request: LoRARequest | None,
        priority: int,
        tokenization_kwargs: dict[str, Any] | None,
    ) -> str:
        request_id = str(next(self._ids))
        _check_type("sampling_params", params, SamplingParams)
        _check_type("lora_request", lora_request, LoRARequest | None)
        params = params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        self.llm_engine.add_request(
            request_id,
            prompt,
            params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            priority=priority,
        )
        return request_id

    def wait_for_completion(self, *, use_tqdm: bool | Callable[..., tqdm[Any]] = True) -> list[RequestOutput]:
        """Answers to everything queued, in the order it was queued. Interrupting it aborts what is left.

        RuntimeError while the engine sleeps and keeps them.
        """
        self.llm_engine.check_kept()
        order, self._order = self._order, []
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        outputs: dict[str, RequestOutput] = {}
        with make_bar(total=len(order), desc="Processed prompts", disable=not use_tqdm) as bar:
            try:
                while self.llm_engine.has_unfinished_requests():
                    for output in self.llm_engine.step():
                        if isinstance(output, RequestOutput) and output.finished:
                            outputs[output.request_id] = output
                            bar.update()
            except BaseException:
                self.llm_engine.abort_request(order)
                raise
        return [outputs[request_id] for request_id in order if request_id in outputs]

    # --- conversations ------------------------------------------------------------------------------------------

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormatOption = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The next message of each conversation. Raises VLLMValidationError naming what is wrong with one."""
        self.enqueue_chat(
            messages,
            sampling_params,
            lora_request=lora_request,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self.wait_for_completion(use_tqdm=use_tqdm)

    def enqueue_chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormatOption = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue conversations without waiting, with the options of `chat`; the ids of their requests."""
        options = ChatOptions(
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            content_format=chat_template_content_format,
            variables=chat_template_kwargs or {},
        )
        return self.enqueue(
            self._chat_prompts(messages, chat_template, options),
            sampling_params,
            lora_request=lora_request,
            priority=priority,
            mm_processor_kwargs=mm_processor_kwargs,
        )

    def _chat_prompts(
        self, messages: Conversation | Sequence[Conversation], chat_template: str | None, options: ChatOptions
    ) -> list[PromptType]:
        tokenizer = self.get_tokenizer()
        _check_type("messages", messages, Sequence)
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        given = load_chat_template(chat_template) or self.chat_template
        template = resolve_template(tokenizer, given, options.tools)
        prompts: list[PromptType] = []
        for conversation in conversations:
            text = render_chat(tokenizer, conversation, template, options)
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append(TokensPrompt(prompt_token_ids=ids, prompt=text))
        return prompts

    # --- other kinds of generation ------------------------------------------------------------------------------

    def beam_search(
        self, prompts: Sequence[PromptType], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The most probable continuations of each prompt, best first. Raises VLLMValidationError for bad parameters."""
        check_beam_params(params)
        tokenizer = self.get_tokenizer()
        return [
            beam_search(self._step_beams, tokenizer, prompt, params)
            for prompt in tqdm(prompts, disable=not use_tqdm)
        ]

    def _step_beams(self, prompts: list[PromptType], params: SamplingParams) -> list[RequestOutput]:
        return self.generate(prompts, params, use_tqdm=False)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Not offered: raises VLLMNotImplementedError."""
        raise VLLMNotImplementedError("encode: pooling models are not part of this build")

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Not offered: raises VLLMNotImplementedError."""
        raise VLLMNotImplementedError("embed: pooling models are not part of this build")

    def classify(self, *args: Any, **kwargs: Any) -> Any:
        """Not offered: raises VLLMNotImplementedError."""
        raise VLLMNotImplementedError("classify: pooling models are not part of this build")

    def score(self, *args: Any, **kwargs: Any) -> Any:
        """Not offered: raises VLLMNotImplementedError."""
        raise VLLMNotImplementedError("score: pooling models are not part of this build")

    # --- control ------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """The tokenizer. Raises ValueError with `skip_tokenizer_init`."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's generation defaults as parameters."""
        return SamplingParams.from_optional(**self.model_config.get_diff_sampling_param())

    def get_world_size(self, include_dp: bool = True) -> int:
        """Number of workers."""
        parallel = self.llm_engine.vllm_config.parallel_config
        return parallel.world_size_across_dp if include_dp else parallel.world_size

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on every worker."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """`func(model)` on every worker."""
        return self.llm_engine.apply_model(func)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget what is cached; True if nothing is held any more."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_prefix_cache_detailed(
        self,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
        tiers: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """The same, telling what became of each tier; with `tiers` ("device", "host", …) only those are emptied."""
        return self.llm_engine.reset_prefix_cache_detailed(reset_running_requests, reset_connector, tiers)

    def reset_mm_cache(self) -> None:
        """Nothing is cached for media; kept for callers of the interface."""
        self.llm_engine.reset_mm_cache()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause and give memory back; see `AsyncLLM.sleep`. Until `wake_up` no prompts are taken (RuntimeError)."""
        self.llm_engine.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory back and go on."""
        self.llm_engine.wake_up(tags)

    def release_kv_cache_memory(self) -> None:
        """Give the KV cache's memory back; the engine must be paused."""
        self.llm_engine.release_kv_cache_memory()

    def start_profile(self) -> None:
        """Start the profiler."""
        self.llm_engine.start_profile()

    def stop_profile(self) -> None:
        """Stop the profiler."""
        self.llm_engine.stop_profile()

    def get_metrics(self) -> list[Metric]:
        """The current metrics. Raises ValueError unless `disable_log_stats=False` was given."""
        return self.llm_engine.get_metrics()

    def shutdown(self) -> None:
        """End the engine. Idempotent; happens by itself when the process ends."""
        self._is_shut_down = True
        self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()


def _prompt_list(prompts: PromptOrPrompts) -> list[Any]:
    """One prompt as a list of one; token ids are one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    _check_type("prompts", prompts, Iterable)
    items = list(prompts)
    return [items] if items and isinstance(items[0], int) else items


def _check_type(name: str, value: object, kinds: Any) -> None:
    if not isinstance(value, kinds):
        wanted = getattr(kinds, "__name__", str(kinds))
        raise VLLMValidationError(f"{name} must be {wanted}, got {type(value).__name__}", parameter=name)


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    """`value` for each of `count` prompts, or its items. Raises ValueError if their number differs."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts")
    return list(value)
