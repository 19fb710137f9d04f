"""Conversations: from request messages to what a chat template takes, and to prompt text. Layer: L8.

Text only: a media part is refused. Knows messages and tools, not routes or engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm.entrypoints.chat_templates import (
    ContentFormat,
    detect_content_format,
    load_chat_template,
    render_template,
)
from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError

ContentFormatOption = Literal["auto", "string", "openai"]
TEXT_PART_TYPES = ("text", "input_text", "output_text", "refusal", "thinking")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Template variables that a request cannot set through chat_template_kwargs.
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "tokenize", "chat_template")

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation is rendered."""

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    content_format: ContentFormatOption = "auto"
    variables: Mapping[str, Any] = field(default_factory=dict)


def resolve_template(tokenizer: Any, given: str | None, tools: Any = None) -> str:
    """The template to use: the given one, else the tokenizer's. Raises VLLMValidationError if there is none."""
    template = given
    if template is None:
        try:
            template = tokenizer.get_chat_template(tools=tools)
        except ValueError:  # how a tokenizer of the transformers library says that it has none
            template = None
    if not template:
        raise VLLMValidationError(
            "the tokenizer has no chat template; give one with --chat-template", parameter="messages"
        )
    return str(template)


def parse_messages(messages: Sequence[Message], content_format: ContentFormat) -> list[dict[str, Any]]:
    """The messages as templates expect them.

    Contents are text (`string`) or lists of text parts (`openai`); arguments of tool calls are objects, not JSON text.
    Raises VLLMValidationError for malformed messages, VLLMUnprocessableEntityError for media.
    """
    if not messages:
        raise VLLMValidationError("messages must not be empty", parameter="messages")
    return [_parse_message(message, index, content_format) for index, message in enumerate(messages)]


def _parse_message(message: Message, index: int, content_format: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _refuse(index, "must be a mapping")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _refuse(index, "role must be a non-empty string")
    content = message.get("content")
    parsed: dict[str, Any] = {"role": role}
    if content is not None:
        parsed["content"] = _parse_content(content, index, content_format)
    elif role == "assistant":
        parsed["content"] = "" if not message.get("tool_calls") else None
    else:
        raise _refuse(index, f"content must be given for role {role!r}")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise _refuse(index, "tool_calls must be a list")
    if calls:
        parsed["tool_calls"] = [_parse_tool_call(call, index) for call in calls]
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            parsed[name] = message[name]
    reasoning = message.get("reasoning", message.get("reasoning_content"))
    if role == "assistant" and isinstance(reasoning, str):
        parsed["reasoning"] = parsed["reasoning_content"] = reasoning
    return parsed


def _refuse(index: int, rule: str) -> VLLMValidationError:
    return VLLMValidationError(f"messages[{index}].{rule}", parameter="messages")


def _parse_content(content: Any, index: int, content_format: ContentFormat) -> Any:
    if isinstance(content, str):
        return content if content_format == "string" else [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _refuse(index, "content must be text or a list of parts")
    texts = [_part_text(part, index) for part in content]
    if content_format == "openai":
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part_text(part: Any, index: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in TEXT_PART_TYPES:
        text = part.get("text", part.get(kind))
        if isinstance(text, str):
            return text
        raise _refuse(index, f"content: a part of type {kind!r} needs its text")
    if isinstance(kind, str):
        refusal = VLLMUnprocessableEntityError(
            f"messages[{index}].content holds a part of type {kind!r}, but this model takes text only"
        )
        refusal.parameter = "messages"
        raise refusal
    raise _refuse(index, "content: every part needs a type")


def _parse_tool_call(call: Any, index: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _refuse(index, "tool_calls: every call needs function.name")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise _refuse(index, f"tool_calls: function.arguments is not valid JSON: {error}") from None
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def special_token_variables(tokenizer: Any) -> dict[str, str]:
    """Special tokens by the names that templates use."""
    known = tokenizer.special_tokens_map
    return {name: str(known[name]) for name in SPECIAL_TOKENS if known.get(name)}


def render_chat(tokenizer: Any, messages: Sequence[Message], template: str, options: ChatOptions) -> str:
    """The prompt text of a conversation. Raises VLLMValidationError naming what is wrong with it."""
    if options.continue_final_message and options.add_generation_prompt:
        raise VLLMValidationError(
            "continue_final_message and add_generation_prompt exclude each other",
            parameter="continue_final_message",
        )
    reserved = [name for name in options.variables if name in RESERVED_VARIABLES]
    if reserved:
        raise VLLMValidationError(
            f"chat_template_kwargs must not set {', '.join(reserved)}", parameter="chat_template_kwargs"
        )
    content_format = (
        detect_content_format(template) if options.content_format == "auto" else options.content_format
    )
    conversation = parse_messages(messages, content_format)
    text = render_template(
        template,
        conversation,
        tools=options.tools or None,
        documents=options.documents or None,
        add_generation_prompt=options.add_generation_prompt,
        variables={**special_token_variables(tokenizer), **options.variables},
    )
    return _open_end(text, conversation[-1]) if options.continue_final_message else text


def _open_end(text: str, last: Mapping[str, Any]) -> str:
    """`text` up to the end of the last message's content, so that the model goes on writing it."""
    content = last.get("content")
    if isinstance(content, list):
        content = content[-1]["text"] if content else ""
    if not isinstance(content, str) or not content.strip():
        raise VLLMValidationError(
            "continue_final_message needs a last message with text", parameter="continue_final_message"
        )
    for ending in (content, content.rstrip(), content.strip()):
        position = text.rfind(ending)
        if position >= 0:
            return text[: position + len(ending)]
    raise VLLMValidationError(
        "the chat template changes the last message, so it cannot be continued",
        parameter="continue_final_message",
    )


__all__ = [
    "ChatOptions",
    "ContentFormatOption",
    "load_chat_template",
    "parse_messages",
    "render_chat",
    "resolve_template",
    "special_token_variables",
]
