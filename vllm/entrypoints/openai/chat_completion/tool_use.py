"""What a request's tools and tool choice mean: shown tools, a grammar, a parser. Layer: L8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    NamedToolChoice,
    shown_tools,
)
from vllm.entrypoints.openai.tool_parsers.base import ToolParser, get_tool_parser, marks_are_special
from vllm.entrypoints.openai.tool_parsers.forced import (
    NamedToolParser,
    RequiredToolParser,
    named_schema,
    required_schema,
)
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.ids import IdSource


class ToolSettings(Protocol):
    """The server flags that matter here."""

    @property
    def enable_auto_tools(self) -> bool: ...
    @property
    def tool_parser(self) -> str | None: ...
    @property
    def exclude_tools_when_tool_choice_none(self) -> bool: ...


@dataclass(frozen=True)
class ToolUse:
    """Tools that the template shows, what the output must look like, and how it is parsed."""

    shown: list[dict[str, Any]] | None = None
    constraint: StructuredOutputsParams | None = None
    make_parser: Callable[[], ToolParser] | None = None
    keep_special_tokens: bool = False

    def new_parser(self) -> ToolParser | None:
        """A parser for one message; None if the message is plain text."""
        return None if self.make_parser is None else self.make_parser()

    @staticmethod
    def of(request: ChatCompletionRequest, settings: ToolSettings, ids: IdSource, tokenizer: Any) -> ToolUse:
        """Read a request. Raises VLLMValidationError for a choice that the server's flags do not allow."""
        if not request.tools:
            return ToolUse()
        shown = shown_tools(request.tools)
        choice = request.effective_tool_choice
        if choice == "none":
            return ToolUse(None if settings.exclude_tools_when_tool_choice_none else shown)
        if isinstance(choice, NamedToolChoice):
            return _named(request, shown, choice.function.name, ids)
        if choice == "required":
            return _required(request, shown, ids)
        return _auto(shown, settings, ids, tokenizer)


def _named(request: ChatCompletionRequest, shown: list[dict[str, Any]], name: str, ids: IdSource) -> ToolUse:
    parameters = next(tool.function.parameters for tool in request.tools or () if tool.function.name == name)
    constraint = _compact(named_schema(parameters))
    return ToolUse(shown, constraint, lambda: NamedToolParser(ids, name))


def _required(request: ChatCompletionRequest, shown: list[dict[str, Any]], ids: IdSource) -> ToolUse:
    functions = [(tool.function.name, tool.function.parameters) for tool in request.tools or ()]
    schema = required_schema(functions, request.parallel_tool_calls is not False)
    return ToolUse(shown, _compact(schema), lambda: RequiredToolParser(ids))


def _compact(schema: dict[str, Any]) -> StructuredOutputsParams:
    """JSON without free white space, in which a weak model could go on for ever."""
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True)


def _auto(shown: list[dict[str, Any]], settings: ToolSettings, ids: IdSource, tokenizer: Any) -> ToolUse:
    if not settings.enable_auto_tools or settings.tool_parser is None:
        raise VLLMValidationError(
            '"auto" tool choice needs a server started with --enable-auto-tool-choice and --tool-call-parser; '
            'tool_choice "required", "none" and a named tool work without',
            parameter="tool_choice",
        )
    parser_class = get_tool_parser(settings.tool_parser)
    keep = tokenizer is not None and marks_are_special(parser_class, tokenizer)
    return ToolUse(shown, None, lambda: parser_class(ids), keep)
