"""Chat templates: sandboxed rendering, and what a template expects of message contents. Layer: L8.

Knows templates only: no request type, no tokenizer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vllm.exceptions import VLLMValidationError

ContentFormat = Literal["string", "openai"]
TEMPLATES_CACHED = 32
# What a template of somebody else raises for messages that it was not made for.
_TEMPLATE_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


@lru_cache(maxsize=TEMPLATES_CACHED)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def load_chat_template(value: str | Path | None) -> str | None:
    """The template itself from a file name or a literal template. Raises ValueError if it is neither."""
    if value is None:
        return None
    text = str(value)
    if "\n" not in text and os.path.isfile(
        text
    ):  # a text too long for a name is no file; `Path` raises there
        return Path(text).read_text(encoding="utf-8")
    if not any(mark in text for mark in ("{%", "{{", "\n")):
        raise ValueError(f"chat template {text!r} is neither a file nor a template")
    return text


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of a conversation.

    Raises VLLMValidationError if the template refuses the messages or fails.
    """
    try:
        return _compiled(template).render(
            messages=list(messages),
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **(variables or {}),
        )
    except _TEMPLATE_FAILURES as error:
        raise VLLMValidationError(
            f"the chat template cannot render these messages: {error}", parameter="messages"
        ) from error


@lru_cache(maxsize=TEMPLATES_CACHED)
def detect_content_format(template: str) -> ContentFormat:
    """`openai` if the template walks through the parts of a message's content, else `string`."""
    try:
        tree = _environment().parse(template)
    except TemplateError:
        return "string"
    aliases = {
        assignment.target.name
        for assignment in tree.find_all(nodes.Assign)
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node)
    }
    for loop in tree.find_all(nodes.For):
        source = loop.iter
        if _is_content(source) or (isinstance(source, nodes.Name) and source.name in aliases):
            return "openai"
    return "string"


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    )
