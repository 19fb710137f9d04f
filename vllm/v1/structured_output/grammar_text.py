"""From a constraint as the user wrote it to a grammar text of the grammar library.

Owns the translation of every constraint kind.  Must not know tokenizers or requests.  Layer: L5 (scheduler).
"""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
from llguidance import LLMatcher, StructTag

from vllm.sampling_params import StructuredOutputsParams

# A JSON schema is an open tree of plain values.
Schema = Any


CONSTRAINT_CHARACTERS_MAX = 100_000
"""Longer constraints are refused unread: the library's work grows faster than their length."""


def grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar of the one constraint that is set.

    Raises:
        ValueError: the constraint is malformed or too long; the message is meant for the user.
    """
    try:
        text = _translate(params)
    except RecursionError:
        raise ValueError("the constraint is nested too deeply") from None
    if len(text) > CONSTRAINT_CHARACTERS_MAX:
        raise ValueError(
            f"the constraint has {len(text)} characters as a grammar, at most {CONSTRAINT_CHARACTERS_MAX} are allowed"
        )
    return text


def _translate(params: StructuredOutputsParams) -> str:
    if params.json is not None:
        return _from_schema(_parse_schema(params.json), params)
    if params.json_object:
        return _from_schema({"type": "object"}, params)
    if params.regex is not None:
        return str(LLMatcher.grammar_from_regex(params.regex))
    if params.choice:
        # One lexeme: as alternatives of a rule, thousands of choices exceed what the parser holds in a row.
        return str(LLMatcher.grammar_from_regex("|".join(f"(?:{re.escape(text)})" for text in params.choice)))
    if params.grammar is not None:
        return str(llguidance.grammar_from("grammar", params.grammar))
    if params.structural_tag is not None:
        return _from_structural_tag(params.structural_tag, params)
    raise ValueError("structured outputs need exactly one non-empty constraint")


def _parse_schema(schema: str | dict[str, Any]) -> Schema:
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except ValueError as error:
        raise ValueError(f"the JSON schema is not valid JSON: {error}") from error


def _from_schema(schema: Schema, params: StructuredOutputsParams) -> str:
    if params.disable_additional_properties:
        schema = _close_objects(schema)
    options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))


def _close_objects(schema: Schema) -> Schema:
    """The schema with ``additionalProperties: false`` in every object that lists properties and leaves it open."""
    if isinstance(schema, list):
        return [_close_objects(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _close_objects(value) for key, value in schema.items()}
    if "properties" in closed or "patternProperties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def _from_structural_tag(text: str, params: StructuredOutputsParams) -> str:
    try:
        description = json.loads(text)
        structures, triggers = description["structures"], description["triggers"]
        tags = [_tag(structure, triggers) for structure in structures]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the structural tag is malformed: {error!r}") from error
    if not tags:
        raise ValueError("the structural tag lists no structures")
    return str(StructTag.to_grammar(tags))


def _tag(structure: dict[str, Any], triggers: list[str]) -> StructTag:
    begin = structure["begin"]
    trigger = next((text for text in triggers if text and begin.startswith(text)), None)
    if trigger is None:
        raise ValueError(f"no trigger starts {begin!r}")
    schema = structure["schema"]
    if not isinstance(schema, dict):
        raise ValueError(f"the schema of {begin!r} must be an object")
    return StructTag(trigger=trigger, begin=begin, grammar=schema, end=structure["end"])
