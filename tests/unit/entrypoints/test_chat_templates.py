import datetime

import pytest

from tests.helpers.tiny_tokenizers import make_tokenizer
from vllm.entrypoints.chat_templates import detect_content_format, load_chat_template, render_template
from vllm.entrypoints.chat_utils import ChatOptions, parse_messages, render_chat, resolve_template
from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError

HI = [{"role": "user", "content": "hi"}]


def test_templates_see_messages_tools_documents_and_variables():
    template = (
        "{{ messages[0].content }}|{{ tools[0].name }}|{{ documents[0] }}|{{ add_generation_prompt }}|{{ x }}"
    )
    text = render_template(
        template,
        HI,
        tools=[{"name": "t"}],
        documents=[{"d": 1}],
        add_generation_prompt=False,
        variables={"x": 5},
    )
    assert text == "hi|t|{'d': 1}|False|5"


def test_helpers_that_templates_expect():
    template = "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content | tojson }}{% endfor %}"
    assert render_template(template, [*HI, {"role": "user", "content": {"ä": "<b>"}}]) == '{"ä": "<b>"}'
    assert render_template("{{ strftime_now('%Y') }}", HI) == str(datetime.datetime.now().year)
    assert render_template("{% generation %}{{ messages[0].content }}{% endgeneration %}", HI) == "hi"
    assert render_template("  {% if true %}\nx\n  {% endif %}\ny", HI) == "x\ny"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ missing.attribute.deep }}",
        "{% for x in 5 %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ [].pop() }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% if %}",
    ],
)
def test_a_template_that_fails_is_the_requests_fault(template):
    with pytest.raises(VLLMValidationError) as error:
        render_template(template, HI)
    assert error.value.parameter == "messages"


def test_the_template_is_sandboxed():
    for attack in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ):
        with pytest.raises(VLLMValidationError):
            render_template(attack, HI)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "string"),
        (
            "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages %}{% set c = m.content %}{% for part in c %}{{ part.text }}{% endfor %}{% endfor %}",
            "openai",
        ),
        ("{% if %}", "string"),
    ],
)
def test_content_format_detection(template, expected):
    assert detect_content_format(template) == expected


def test_templates_come_from_files_or_text(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ x }}")
    assert load_chat_template(str(path)) == load_chat_template(path) == "{{ x }}"
    assert load_chat_template("{{ y }}") == "{{ y }}"
    assert load_chat_template(None) is None
    long = "{{ y }}" + 300 * "x"
    assert load_chat_template(long) == long
    with pytest.raises(ValueError, match=r"'nowhere\.jinja' is neither a file nor a template"):
        load_chat_template("nowhere.jinja")


# --- messages -----------------------------------------------------------------------------------------------------


def test_contents_in_both_formats():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]}
    ]
    assert parse_messages(messages, "string")[0]["content"] == "a\nb\nc"
    assert parse_messages(messages, "openai")[0]["content"] == [{"type": "text", "text": t} for t in "abc"]
    assert parse_messages(HI, "openai")[0]["content"] == [{"type": "text", "text": "hi"}]


def test_tool_calls_become_objects():
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parsed = parse_messages([{"role": "assistant", "tool_calls": [call]}], "string")[0]
    assert parsed["content"] is None
    assert parsed["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    for arguments in (None, "", {}):
        call = {"function": {"name": "f", "arguments": arguments}}
        parsed = parse_messages([{"role": "assistant", "tool_calls": [call]}], "string")[0]
        assert parsed["tool_calls"][0]["function"]["arguments"] == {}


def test_arguments_nested_too_deeply_are_refused():
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    with pytest.raises(VLLMValidationError, match="not valid JSON") as caught:
        parse_messages([{"role": "assistant", "tool_calls": [call]}], "string")
    assert caught.value.parameter == "messages"


def test_other_fields_of_messages():
    parsed = parse_messages(
        [
            {"role": "tool", "content": "42", "tool_call_id": "1", "name": "f"},
            {"role": "assistant", "reasoning": "why", "content": None},
        ],
        "string",
    )
    assert parsed[0] == {"role": "tool", "content": "42", "tool_call_id": "1", "name": "f"}
    assert (parsed[1]["reasoning_content"], parsed[1]["content"]) == ("why", "")


@pytest.mark.parametrize("part", [{"type": "image_url"}, {"type": "input_audio"}])
def test_media_is_refused(part):
    with pytest.raises(VLLMUnprocessableEntityError, match="text only"):
        parse_messages([{"role": "user", "content": [part]}], "string")


@pytest.mark.parametrize("content", [[{"type": "text"}], [3], [{"type": "text", "text": 3}]])
def test_malformed_parts_are_refused(content):
    with pytest.raises(VLLMValidationError, match=r"messages\[0\]"):
        parse_messages([{"role": "user", "content": content}], "string")


# --- rendering ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer():
    return make_tokenizer("byte_level")


def test_special_tokens_are_variables(tokenizer):
    assert (
        render_chat(tokenizer, HI, "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", ChatOptions())
        == "<s>hi</s>"
    )


def test_a_continued_message_loses_its_end(tokenizer):
    template = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    messages = [*HI, {"role": "assistant", "content": " half "}]
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    assert render_chat(tokenizer, messages, template, options) == "[hi][half"
    parts = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "half"}]}]
    looped = "{% for m in messages %}[{% for p in m.content %}{{ p.text }}{% endfor %}]{% endfor %}"
    assert render_chat(tokenizer, parts, looped, options) == "[hi][half"


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (HI, {"continue_final_message": True}),
        (
            [{"role": "assistant", "content": " "}],
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
        (
            [{"role": "assistant", "content": "gone"}],
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
        (HI, {"variables": {"messages": []}}),
    ],
)
def test_options_that_cannot_work(tokenizer, messages, options):
    with pytest.raises(VLLMValidationError):
        render_chat(tokenizer, messages, "{{ 'other' }}", ChatOptions(**options))


def test_which_template_is_used(tokenizer, monkeypatch):
    assert resolve_template(tokenizer, "given") == "given"
    with pytest.raises(VLLMValidationError, match="--chat-template"):
        resolve_template(tokenizer, None)

    class Slow:
        def get_chat_template(self, tools=None):
            raise ValueError("no template")

    with pytest.raises(VLLMValidationError, match="--chat-template"):
        resolve_template(Slow(), None)
