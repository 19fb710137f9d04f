"""Prompts of requests → token ids: templates, tokenisation, truncation. Layer: L8.

Owns the tokenizer's use in the front end. Long texts are tokenised in a thread, so that streams of others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from vllm.entrypoints.chat_utils import (
    ChatOptions,
    ContentFormatOption,
    Message,
    render_chat,
    resolve_template,
)
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.transformers_utils.tokenizer import characters_at_most

logger = init_logger(__name__)

T = TypeVar("T")
# Characters up to which a text is tokenised without leaving the event loop.
INLINE_TEXT_MAX = 2048


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt ready for the engine; `text` is None where the caller gave token ids."""

    token_ids: list[int]
    text: str | None


@dataclass(frozen=True)
class Truncation:
    """Keep at most `max_tokens` prompt tokens (−1: what the model takes), cut at one side."""

    max_tokens: int | None = None
    side: str | None = None


@dataclass(frozen=True)
class TemplateSettings:
    """The server's chat template settings."""

    chat_template: str | None = None
    content_format: ContentFormatOption = "auto"
    trust_request_template: bool = False
    default_kwargs: Mapping[str, Any] = field(default_factory=dict)


class OnlineRenderer:
    """Renders prompts for one model. `tokenizer` None: token ids only."""

    def __init__(
        self, model_config: Any, tokenizer: Any | None, templates: TemplateSettings = TemplateSettings()
    ) -> None:
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.templates = templates
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="renderer")

    def set_chat_template(self, template: str) -> None:
        """Use this template instead of the tokenizer's."""
        self.templates = replace(self.templates, chat_template=template)

    def close(self) -> None:
        """End the thread."""
        self._threads.shutdown(wait=False)

    def need_tokenizer(self) -> Any:
        """The tokenizer. Raises VLLMValidationError with `skip_tokenizer_init`."""
        if self.tokenizer is None:
            raise VLLMValidationError(
                "text needs a tokenizer, but skip_tokenizer_init is set; give token ids"
            )
        return self.tokenizer

    async def render_prompt(
        self,
        prompt: str | list[int],
        add_special_tokens: bool = True,
        truncation: Truncation = Truncation(),
        characters: int = 0,
    ) -> RenderedPrompt:
        """Token ids of a plain prompt. `characters`: of all prompts of its request, where there are several."""
        if not isinstance(prompt, str):
            return RenderedPrompt(self._truncated(prompt, truncation), None)
        tokenizer = self.need_tokenizer()
        self._refuse_hopeless(tokenizer, len(prompt), "prompt", truncation)
        ids = await self._run(
            max(len(prompt), characters),
            lambda: tokenizer.encode(prompt, add_special_tokens=add_special_tokens),
        )
        return RenderedPrompt(self._truncated(ids, truncation), prompt)

    async def render_messages(
        self,
        messages: Sequence[Message],
        options: ChatOptions,
        request_template: str | None = None,
        add_special_tokens: bool = False,
        truncation: Truncation = Truncation(),
    ) -> RenderedPrompt:
        """Token ids of a conversation. Raises VLLMValidationError naming what is wrong with it."""
        tokenizer = self.need_tokenizer()
        template = resolve_template(tokenizer, self._template(request_template), options.tools)
        texts = [text for message in messages if isinstance(text := message.get("content"), str)]
        self._refuse_hopeless(tokenizer, max(map(len, texts), default=0), "messages", truncation)
        size = _extent([messages, options.tools, options.documents, options.variables, request_template])

        def work() -> tuple[str, list[int]]:
            text = render_chat(tokenizer, messages, template, options)
            self._refuse_hopeless(tokenizer, len(text), "messages", truncation)
            return text, tokenizer.encode(text, add_special_tokens=add_special_tokens)

        text, ids = await self._run(size, work)
        return RenderedPrompt(self._truncated(ids, truncation), text)

    def _template(self, request_template: str | None) -> str | None:
        if request_template is None:
            return self.templates.chat_template
        if not self.templates.trust_request_template:
            raise VLLMValidationError(
                "chat_template of a request needs --trust-request-chat-template", parameter="chat_template"
            )
        return request_template

    def _refuse_hopeless(self, tokenizer: Any, size: int, parameter: str, truncation: Truncation) -> None:
        """Refuses a text that is too long whatever its tokens are, before minutes are spent on finding them."""
        limit = self.model_config.max_model_len
        most = characters_at_most(tokenizer, limit)
        if truncation.max_tokens is None and most is not None and size > most:
            raise VLLMValidationError(
                f"The text has {size} characters, but the model takes at most {limit} tokens (max_model_len), which "
                f"hold at most {most} characters",
                parameter=parameter,
                value=size,
            )

    async def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, special tokens included."""
        tokenizer = self.need_tokenizer()
        return str(await self._run(len(token_ids), lambda: tokenizer.decode(token_ids)))

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= INLINE_TEXT_MAX:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _truncated(self, ids: list[int], truncation: Truncation) -> list[int]:
        limit = truncation.max_tokens
        if limit is None:
            return ids
        max_model_len = self.model_config.max_model_len
        if limit > max_model_len:
            raise VLLMValidationError(
                f"truncate_prompt_tokens={limit} is larger than max_model_len={max_model_len}",
                parameter="truncate_prompt_tokens",
                value=limit,
            )
        limit = max_model_len - 1 if limit == -1 else limit
        if limit == 0:
            raise VLLMValidationError(
                "truncate_prompt_tokens=0 leaves no prompt", parameter="truncate_prompt_tokens", value=0
            )
        return ids[:limit] if truncation.side == "right" else ids[-limit:]


def _extent(values: Any) -> int:
    """About how many characters there are in nested values; counts only until they are too many for the event loop."""
    size, waiting = 0, [values]
    while waiting and size <= INLINE_TEXT_MAX:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        size += len(value) if isinstance(value, str | Mapping | list | tuple) else 1
    return size


def resolve_max_tokens(
    model_config: Any,
    prompt_tokens: int,
    requested: int | None,
    default: int | None,
    field_name: str,
    prompt_field: str,
) -> int:
    """How many tokens may be generated. `requested` None: `default`, or all that fits if that is None too.

    Raises VLLMValidationError naming the model's limit, the prompt's length and the requested number.
    """
    limit: int = model_config.max_model_len
    room = limit - prompt_tokens
    if room < 1:
        raise VLLMValidationError(
            f"The prompt has {prompt_tokens} tokens, but the model takes at most {limit} (max_model_len): at most "
            f"{limit - 1} prompt tokens leave room for an output",
            parameter=prompt_field,
            value=prompt_tokens,
        )
    if requested is not None and requested > room:
        raise VLLMValidationError(
            f"The model takes at most {limit} tokens (max_model_len), but {requested} output tokens are requested for "
            f"a prompt of {prompt_tokens} tokens; at most {room} are possible",
            parameter=field_name,
            value=requested,
        )
    if requested is None:
        requested = room if default is None else min(room, default)
    cap: int | None = model_config.override_generation_config.get("max_new_tokens")
    return requested if cap is None else min(requested, cap)
