"""Tool calls: parsers for every way of cutting the text, and the endpoint's finish reasons."""

import json

import pytest

from tests.helpers.fake_engine import Step
from tests.helpers.http_app import App, says
from vllm.entrypoints.openai.tool_parsers import base
from vllm.entrypoints.openai.tool_parsers.base import (
    CallArguments,
    CallStart,
    TextPiece,
    get_tool_parser,
    held_back,
)
from vllm.entrypoints.openai.tool_parsers.forced import NamedToolParser, RequiredToolParser, required_schema
from vllm.exceptions import VLLMValidationError
from vllm.utils.ids import CountingIds

PATH = "/v1/chat/completions"
SIZES = [1, 2, 3, 5, 10_000]
NESTED = '{"x": [1, {"y": "}<"}], "s": "\\"</tool_call>", "n": null}'

FIRST_EMPTY = '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
THEN_NESTED = f'<tool_call>\n{{"name": "b", "arguments": {NESTED}}}\n</tool_call>'
JSON_NESTED = f'{{"name": "a", "parameters": {NESTED}}}'

# parser, text → content, [(name, arguments)], whether the message ends in a complete call
CASES = {
    "two calls, the first empty": (
        "hermes",
f"Hi.\n{FIRST_EMPTY}\n{THEN_NESTED}",
        ("Hi.", [("a", "{}"), ("b", NESTED)], True),
    ),
    "no call": ("hermes", "plain < text <tool_cal no\n ", ("plain < text <tool_cal no\n ", [], False)),
    "arguments first": (
        "hermes",
        '<tool_call>{"arguments": {"q": 1}, "name": "z"}</tool_call> after',
        (" after", [("z", '{"q": 1}')], True),
    ),
    "no arguments": ("hermes", '<tool_call>{"name": "z"}</tool_call>', ("", [("z", "{}")], True)),
    "null arguments": ("hermes", '<tool_call>{"name": "z", "arguments": null}</tool_call>', ("", [("z", "{}")], True)),
    "arguments as text": ("hermes", '<tool_call>{"name":"k","arguments":"{\\"a\\": 1}"}</tool_call>', ("", [("k", '{"a": 1}')], True)),
    "other keys": ("hermes", '<tool_call>{"id": 1.5, "name": "z", "x": true}</tool_call>', ("", [("z", "{}")], True)),
    "not a call": ("hermes", "<tool_call>oops</tool_call> tail", ("<tool_call>oops</tool_call> tail", [], False)),
    "a list": ("hermes", "<tool_call>[1]</tool_call>", ("<tool_call>[1]</tool_call>", [], False)),
    "no name": ("hermes", '<tool_call>{"x": 1}</tool_call>', ('<tool_call>{"x": 1}</tool_call>', [], False)),
    "empty name": ("hermes", '<tool_call>{"name": ""}</tool_call>', ('<tool_call>{"name": ""}</tool_call>', [], False)),
    "cut before the name": ("hermes", 'x<tool_call>{"na', ('x<tool_call>{"na', [], False)),
    "cut in the arguments": ("hermes", '<tool_call>{"name": "z", "arguments": {"a": 1', ("", [("z", '{"a": 1')], False)),
    "broken behind the name": ("hermes", '<tool_call>{"name": "z" oops}</tool_call>', ("", [("z", "")], False)),
    "stray brace": ("hermes", '<tool_call>{"name": }}</tool_call>', ('<tool_call>{"name": }}</tool_call>', [], False)),
    "white space only": ("hermes", " \n", (" \n", [], False)),
    "nothing": ("hermes", "", ("", [], False)),
    "half a tag": ("hermes", "a<tool_", ("a<tool_", [], False)),
    "two json calls": ("llama3_json", JSON_NESTED + '; {"name": "c", "parameters": {}}', ("", [("a", NESTED), ("c", "{}")], True)),
    "json with the tag": ("llama3_json", '<|python_tag|>{"name": "a", "parameters": {}}', ("", [("a", "{}")], True)),
    "text": ("llama3_json", 'hello {"name"', ('hello {"name"', [], False)),
    "json but no call": ("llama3_json", '{"nome": 3}', ('{"nome": 3}', [], False)),
    "json cut": ("llama3_json", '{"name": "a", "parameters": {"b": ', ("", [("a", '{"b": ')], False)),
    "json cut before the name": ("llama3_json", '{"na', ('{"na', [], False)),
    "json and text": ("llama3_json", '{"name": "a", "parameters": {}} done', (" done", [("a", "{}")], True)),
    "json space": ("llama3_json", " ", (" ", [], False)),
}  # fmt: skip


def run(parser, text, size):
    pieces = []
    for start in range(0, len(text), size):
        pieces += parser.feed(text[start : start + size])
    pieces += parser.finish()
    content = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    starts = [piece for piece in pieces if isinstance(piece, CallStart)]
    arguments = {start.index: "" for start in starts}
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.index] += piece.text
    assert [start.index for start in starts] == list(range(len(starts)))
    assert len({start.id for start in starts}) == len(starts)
    return content, [(start.name, arguments[start.index]) for start in starts], parser.ends_in_call


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_api_08_the_result_depends_on_the_text_alone(case, size):
    name, text, expected = CASES[case]
    assert run(get_tool_parser(name)(CountingIds()), text, size) == expected


@pytest.mark.parametrize("size", SIZES)
def test_forced_calls(size):
    text = f' [{{"name": "a", "parameters": {NESTED}}}, {{"name": "b", "parameters": {{}}}}]'
    assert run(RequiredToolParser(CountingIds()), text, size) == ("", [("a", NESTED), ("b", "{}")], True)
    assert run(NamedToolParser(CountingIds(), "f"), NESTED, size) == ("", [("f", NESTED)], True)
    assert run(RequiredToolParser(CountingIds()), '[{"x"}, {"name": "b", "parameters": {}}]', size)[1] == [
        ("b", "{}")
    ]


@pytest.mark.parametrize(
    ("text", "count"), [("ab", 0), ("a<", 1), ("<tool", 5), ("<tool_call>", 0), ("x<<", 1)]
)
def test_held_back(text, count):
    assert held_back(text, ("<tool_call>",)) == count


def test_schema_of_required_calls():
    functions = [
        (
            "a",
            {
                "type": "object",
                "properties": {"x": {"$ref": "#/$defs/X"}},
                "$defs": {"X": {"type": "integer"}},
            },
        ),
        ("b", None),
    ]
    schema = required_schema(functions, parallel=True)
    assert schema["$defs"] == {"X": {"type": "integer"}}
    assert [call["properties"]["name"]["enum"] for call in schema["items"]["anyOf"]] == [["a"], ["b"]]
    assert "maxItems" not in schema
    assert required_schema(functions[1:], parallel=False)["maxItems"] == 1


def test_definitions_of_functions_do_not_replace_each_other():
    def function(name, kind):
        return name, {"properties": {"x": {"$ref": "#/definitions/X"}}, "definitions": {"X": {"type": kind}}}

    equal = required_schema([function("a", "integer"), function("b", "integer")], parallel=True)
    assert equal["definitions"] == {"X": {"type": "integer"}}
    with pytest.raises(VLLMValidationError, match="'b' defines 'X'") as caught:
        required_schema([function("a", "integer"), function("b", "string")], parallel=True)
    assert caught.value.parameter == "tools"
    odd = required_schema([("a", {"$defs": 5})], parallel=True)
    assert odd["items"]["properties"]["parameters"] == {"$defs": 5}, "the grammar's check says what is wrong"


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_arguments_nested_too_deeply_are_no_call(name):
    text = '{"name": "f", "arguments": ' + "[" * 50_000 + "]" * 50_000 + "}"
    parser = get_tool_parser(name)(CountingIds())
    pieces = parser.feed(f"<tool_call>{text}</tool_call>" if name == "hermes" else text) + parser.finish()
    assert not parser.ends_in_call
    assert not any(isinstance(piece, base.CallArguments) for piece in pieces)


def test_unknown_parser_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'nope'; known: hermes"):
        get_tool_parser("nope")


def test_a_plugin_adds_a_parser(tmp_path, monkeypatch):
    monkeypatch.setattr(base.TOOL_PARSERS, "_targets", dict(base.TOOL_PARSERS._targets))
    plugin = tmp_path / "my_parsers_for_test.py"
    plugin.write_text(
        "from vllm.entrypoints.openai.tool_parsers.base import TOOL_PARSERS, ToolParser\n"
        "class Mine(ToolParser):\n"
        "    def feed(self, text): return []\n"
        "    def finish(self): return []\n"
        "TOOL_PARSERS.register('mine', 'my_parsers_for_test:Mine')\n"
    )
    base.load_tool_parser_plugin(str(plugin))
    assert get_tool_parser("mine")(CountingIds()).feed("x") == []
    with pytest.raises(ValueError, match="not a file"):
        base.load_tool_parser_plugin(str(tmp_path / "none.py"))


# --- the endpoint -------------------------------------------------------------------------------------------------

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time"}},
]
AUTO = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
)


def cut(text, size):
    return [text[i : i + size] for i in range(0, len(text), size)]


def streamed_calls(chunks):
    """Tool calls and finish reason put together from a stream, as a client does it."""
    calls = {}
    for chunk in chunks:
        for delta in chunk["choices"][0]["delta"].get("tool_calls", ()):
            call = calls.setdefault(delta["index"], {"arguments": ""})
            if "id" in delta:
                call.update(id=delta["id"], type=delta["type"], name=delta["function"]["name"])
            call["arguments"] += delta["function"]["arguments"]
    return [calls[index] for index in sorted(calls)], chunks[-1]["choices"][0]["finish_reason"]


@pytest.mark.parametrize("size", SIZES)
async def test_api_08_stream_and_whole_reply_agree(tmp_path, size):
    app = App(tmp_path, says(*cut("Sure. " + CALLS, size)), AUTO)
    choice = (await app.chat(tools=TOOLS))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Sure.", "tool_calls")
    whole = [
        (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]
    ]
    assert whole == [("weather", '{"city": "Köln"}'), ("time", "{}")]
    calls, finish = streamed_calls(await app.stream(PATH, tools=TOOLS))
    assert [(call["name"], call["arguments"]) for call in calls] == whole
    assert finish == "tool_calls"
    assert len({call["id"] for call in calls}) == 2
    assert all(json.loads(call["arguments"]) is not None for call in calls)


async def test_content_is_null_beside_calls_and_tools_are_shown(tmp_path):
    app = App(tmp_path, says(CALLS), AUTO)
    message = (await app.chat(tools=TOOLS))["choices"][0]["message"]
    assert message["content"] is None
    assert "[2 tools]" in app.call.prompt["prompt"]


@pytest.mark.parametrize("size", SIZES)
async def test_api_09_a_truncated_call_ends_with_length(tmp_path, size):
    text = CALLS[: CALLS.index("Köln") + 2]
    app = App(tmp_path, says(*cut(text, size), finish="length"), AUTO)
    choice = (await app.chat(tools=TOOLS))["choices"][0]
    calls, finish = streamed_calls(await app.stream(PATH, tools=TOOLS))
    assert choice["finish_reason"] == finish == "length"
    assert (
        calls[0]["arguments"] == choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Kö'
    )


async def test_api_09_the_limit_wins_over_complete_calls(tmp_path):
    app = App(tmp_path, says(CALLS, finish="length"), AUTO)
    assert (await app.chat(tools=TOOLS))["choices"][0]["finish_reason"] == "length"


async def test_a_message_without_calls_ends_with_stop(tmp_path):
    app = App(tmp_path, says("No."), AUTO)
    choice = (await app.chat(tools=TOOLS))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("No.", "stop")


@pytest.mark.parametrize("size", SIZES)
async def test_api_10_required_calls_stream_once(tmp_path, size):
    text = '[{"name":"weather","parameters":{"city":"Köln"}},{"name":"time","parameters":{}}]'
    app = App(tmp_path, says(*cut(text, size)), AUTO)
    choice = (await app.chat(tools=TOOLS, tool_choice="required"))["choices"][0]
    calls, finish = streamed_calls(await app.stream(PATH, tools=TOOLS, tool_choice="required"))
    assert choice["finish_reason"] == finish == "tool_calls"
    whole = [
        (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]
    ]
    assert (
        [(call["name"], call["arguments"]) for call in calls]
        == whole
        == [("weather", '{"city":"Köln"}'), ("time", "{}")]
    )
    schema = app.call.params.structured_outputs.json
    assert schema["type"] == "array"
    assert schema["items"]["anyOf"][0]["properties"]["parameters"] == PARAMETERS


async def test_a_named_tool_constrains_to_its_arguments(tmp_path):
    app = App(tmp_path, says('{"city":', '"Köln"}'))
    choice_ = {"type": "function", "function": {"name": "weather"}}
    choice = (await app.chat(tools=TOOLS, tool_choice=choice_))["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": '{"city":"Köln"}',
    }
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", None)
    calls, finish = streamed_calls(await app.stream(PATH, tools=TOOLS, tool_choice=choice_))
    assert (calls[0]["name"], calls[0]["arguments"], finish) == ("weather", '{"city":"Köln"}', "stop")
    assert app.call.params.structured_outputs.json == PARAMETERS


async def test_one_call_only_on_request(tmp_path):
    app = App(tmp_path, says(CALLS), AUTO)
    message = (await app.chat(tools=TOOLS, parallel_tool_calls=False))["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    await app.chat(tools=TOOLS, parallel_tool_calls=False, tool_choice="required")
    assert app.call.params.structured_outputs.json["maxItems"] == 1


@pytest.mark.parametrize(("flags", "shown"), [([], True), (["--exclude-tools-when-tool-choice-none"], False)])
async def test_tool_choice_none_is_plain_text(tmp_path, flags, shown):
    app = App(tmp_path, says(CALLS), flags)
    choice = (await app.chat(tools=TOOLS, tool_choice="none"))["choices"][0]
    assert choice["message"]["content"] == CALLS
    assert ("tools]" in app.call.prompt["prompt"]) is shown


async def test_tags_that_are_special_tokens_are_kept_in_the_text(tmp_path):
    app = App(tmp_path, says("x"), AUTO)
    await app.chat(tools=TOOLS)
    assert app.call.params.skip_special_tokens is True
    tokenizer = app.engine.tokenizer

    class Special:
        all_special_ids = [5]
        convert_tokens_to_ids = staticmethod(lambda token: 5 if token == "<tool_call>" else 6)

        def __getattr__(self, name):
            return getattr(tokenizer, name)

    app.app.state.serving.renderer.tokenizer = Special()
    await app.chat(tools=TOOLS)
    assert app.call.params.skip_special_tokens is False
    await app.chat(tools=TOOLS, skip_special_tokens=True)
    assert app.call.params.skip_special_tokens is True


async def test_several_samples_have_parsers_of_their_own(tmp_path):
    app = App(tmp_path, lambda call, sample: [Step(CALLS if sample else "plain", [1], "stop")], AUTO)
    choices = (await app.chat(tools=TOOLS, n=2))["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [0, 2]
