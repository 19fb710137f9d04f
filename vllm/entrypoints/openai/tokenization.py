"""`/tokenize`, `/detokenize`, `/tokenizer_info`. Layer: L8."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, model_validator

from vllm.entrypoints.chat_utils import ChatOptions
from vllm.entrypoints.openai.chat_completion.protocol import Tools, shown_tools
from vllm.entrypoints.openai.field_types import Objects, TokenIds
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.render import OnlineRenderer
from vllm.entrypoints.openai.request_fields import OpenAIBaseModel
from vllm.exceptions import VLLMValidationError


class TokenizeRequest(OpenAIBaseModel):
    """A prompt, or a conversation, to be turned into token ids."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise VLLMValidationError("exactly one of prompt and messages must be given", parameter="prompt")
        return self


class TokenizeResponse(BaseModel):
    """Token ids; `token_strs` only if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(OpenAIBaseModel):
    """Token ids to be turned into text."""

    model: str | None = None
    tokens: TokenIds


class DetokenizeResponse(BaseModel):
    """The text."""

    prompt: str


class TokenizerInfoResponse(BaseModel):
    """The tokenizer's own settings."""

    tokenizer_class: str
    vocab_size: int
    max_token_id: int
    special_tokens: dict[str, str]
    chat_template: str | None = None


async def tokenize(
    request: TokenizeRequest, models: OpenAIServingModels, renderer: OnlineRenderer
) -> TokenizeResponse:
    """Token ids as a generating endpoint would see them. Raises VLLMError for what it would refuse."""
    models.check_model(request.model)
    if request.messages is not None:
        options = ChatOptions(
            tools=shown_tools(request.tools) if request.tools else None,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            content_format=renderer.templates.content_format,
            variables={**renderer.templates.default_kwargs, **(request.chat_template_kwargs or {})},
        )
        rendered = await renderer.render_messages(
            request.messages, options, request.chat_template, bool(request.add_special_tokens)
        )
    else:
        renderer.need_tokenizer()
        rendered = await renderer.render_prompt(request.prompt or "", request.add_special_tokens is not False)
    ids = rendered.token_ids
    strings = (
        list(renderer.need_tokenizer().convert_ids_to_tokens(ids)) if request.return_token_strs else None
    )
    return TokenizeResponse(
        count=len(ids), max_model_len=renderer.model_config.max_model_len, tokens=ids, token_strs=strings
    )


async def detokenize(
    request: DetokenizeRequest, models: OpenAIServingModels, renderer: OnlineRenderer
) -> DetokenizeResponse:
    """The text of token ids, special tokens included. Raises VLLMValidationError for an id outside the vocabulary."""
    models.check_model(request.model)
    renderer.need_tokenizer()
    limit = renderer.model_config.get_vocab_size()
    for token_id in (min(request.tokens, default=0), max(request.tokens, default=0)):
        if not 0 <= token_id < limit:
            raise VLLMValidationError(
                f"token id {token_id} is outside the vocabulary of {limit}",
                parameter="tokens",
                value=token_id,
            )
    return DetokenizeResponse(prompt=await renderer.decode(request.tokens))


def tokenizer_info(renderer: OnlineRenderer) -> TokenizerInfoResponse:
    """What is known about the tokenizer."""
    tokenizer = renderer.need_tokenizer()
    template = renderer.templates.chat_template or tokenizer.chat_template
    return TokenizerInfoResponse(
        tokenizer_class=type(tokenizer).__name__,
        vocab_size=len(tokenizer),
        max_token_id=max(tokenizer.get_vocab().values()),
        special_tokens={name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        chat_template=template if isinstance(template, str) else None,
    )
