"""`/v1/chat/completions` against a scripted engine: rendering, whole replies, streams, reasoning, batches."""

import pytest

from tests.helpers.fake_engine import Step
from tests.helpers.http_app import App, says
from vllm.exceptions import GenerationError

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
def app(tmp_path):
    return App(tmp_path, says("Hel", "lo"))


async def test_a_whole_reply(app):
    body = await app.chat(max_tokens=5)
    assert app.call.prompt["prompt"] == "<user>hi</user><assistant>"
    choice = body["choices"][0]
    assert (choice["message"]["role"], choice["message"]["content"], choice["finish_reason"]) == (
        "assistant",
        "Hello",
        "stop",
    )
    assert (choice["message"]["tool_calls"], choice["message"]["reasoning"], choice["logprobs"]) == (
        [],
        None,
        None,
    )
    assert (body["object"], body["model"], body["id"][:9]) == ("chat.completion", "m", "chatcmpl-")
    prompt = len(app.call.prompt["prompt_token_ids"])
    assert body["usage"] == {
        **body["usage"],
        "prompt_tokens": prompt,
        "completion_tokens": 2,
        "total_tokens": prompt + 2,
    }


async def test_the_stream_opens_with_the_role_and_says_the_same(app):
    chunks = await app.stream(PATH)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_every_sample_opens_once(tmp_path):
    app = App(tmp_path, lambda call, sample: [Step(f"a{sample}", [1]), Step("b", [2], "stop")])
    chunks = await app.stream(PATH, n=2)
    for sample in (0, 1):
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == sample]
        assert deltas == [{"role": "assistant", "content": ""}, {"content": f"a{sample}"}, {"content": "b"}]
    body = await app.chat(n=2)
    assert [choice["message"]["content"] for choice in body["choices"]] == ["a0b", "a1b"]


async def test_api_03_no_empty_content_but_no_token_lost(tmp_path):
    app = App(tmp_path, says("", "a", "", "", "b", ""))
    chunks = await app.stream(PATH, return_token_ids=True, logprobs=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"].get("content") for choice in choices] == ["", "a", "b", None]
    assert [choice.get("token_ids") for choice in choices] == [None, [100, 101], [102, 103, 104], [105]]
    assert [len(choice["logprobs"]["content"]) for choice in choices[1:]] == [2, 3, 1]
    assert chunks[0]["prompt_token_ids"] == app.call.prompt["prompt_token_ids"]
    assert "prompt_token_ids" not in chunks[1]


async def test_log_probabilities(app):
    content = (await app.chat(logprobs=True, top_logprobs=1))["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == "Hel"
    assert content[0]["bytes"] == [72, 101, 108]
    assert content[0]["top_logprobs"] == [{"token": "Hel", "logprob": -0.25, "bytes": [72, 101, 108]}]
    assert app.call.params.logprobs == 1
    content = (await app.chat(logprobs=True))["choices"][0]["logprobs"]["content"]
    assert content[1]["top_logprobs"] == []
    content = (await app.chat(logprobs=True, top_logprobs=-1, return_tokens_as_token_ids=True))["choices"][0][
        "logprobs"
    ]["content"]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["token_id:100", "token_id:1100"]


async def test_limits_have_two_names(app):
    await app.chat(max_tokens=5)
    assert app.call.params.max_tokens == 5
    await app.chat(max_completion_tokens=6, max_tokens=5)
    assert app.call.params.max_tokens == 6
    await app.chat()
    assert app.call.params.max_tokens == 2048 - len(app.call.prompt["prompt_token_ids"])
    for name in ("max_tokens", "max_completion_tokens"):
        error = await app.error(PATH, {"messages": HI, name: 3000})
        assert (error["code"], error["param"]) == (400, name)
        assert "3000" in error["message"]
    error = await app.error(PATH, {"messages": [{"role": "user", "content": "x" * 3000}]})
    assert (error["code"], error["param"]) == (400, "messages")


async def test_generation_defaults_of_the_model(tmp_path):
    app = App(
        tmp_path,
        says("a"),
        ["--override-generation-config", '{"max_new_tokens": 7, "temperature": 0.3, "top_k": 4}'],
    )
    await app.chat()
    assert (app.call.params.max_tokens, app.call.params.temperature, app.call.params.top_k) == (7, 0.3, 4)
    await app.chat(max_tokens=100, temperature=0.9)
    assert (app.call.params.max_tokens, app.call.params.temperature) == (7, 0.9)


async def test_continuing_the_last_message(app):
    messages = [*HI, {"role": "assistant", "content": "The answer is "}]
    await app.chat(messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert app.call.prompt["prompt"] == "<user>hi</user><assistant>The answer is "
    body = await app.chat(
        messages=messages, add_generation_prompt=False, continue_final_message=True, echo=True
    )
    assert body["choices"][0]["message"]["content"] == "The answer is Hello"
    chunks = await app.stream(
        PATH, messages=messages, add_generation_prompt=False, continue_final_message=True, echo=True
    )
    assert (
        "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "The answer is Hello"
    )
    assert (await app.error(PATH, {"messages": messages, "continue_final_message": True}))[
        "param"
    ] == "continue_final_message"


async def test_a_template_of_the_request_must_be_trusted(tmp_path):
    body = {"messages": HI, "chat_template": "{{ messages[0].content }}!"}
    assert (await App(tmp_path / "a", says("x")).error(PATH, body))["param"] == "chat_template"
    app = App(tmp_path / "b", says("x"), ["--trust-request-chat-template"])
    await app.chat(**body)
    assert app.call.prompt["prompt"] == "hi!"


async def test_template_variables(tmp_path):
    flags = ["--trust-request-chat-template", "--default-chat-template-kwargs", '{"a": 1, "b": 2}']
    app = App(tmp_path, says("x"), flags)
    await app.chat(
        chat_template="{{ a }}{{ b }}{{ reasoning_effort }}",
        chat_template_kwargs={"b": 3},
        reasoning_effort="low",
    )
    assert app.call.prompt["prompt"] == "13low"
    error = await app.error(PATH, {"messages": HI, "chat_template_kwargs": {"messages": []}})
    assert error["param"] == "chat_template_kwargs"


async def test_prompt_text_and_ids_on_request(app):
    body = await app.chat(return_prompt_text=True, return_token_ids=True)
    assert body["prompt_text"] == "<user>hi</user><assistant>"
    assert body["prompt_token_ids"] == app.call.prompt["prompt_token_ids"]
    assert body["choices"][0]["token_ids"] == [100, 101]


async def test_the_final_chunk_carries_usage_and_the_connectors_answer(tmp_path):
    app = App(
        tmp_path, says("a"), ["--enable-prompt-tokens-details"], kv_transfer_params={"r": 1}, cached_tokens=3
    )
    chunks = await app.stream(PATH, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert chunks[-2]["kv_transfer_params"] == {"r": 1}
    assert chunks[-1]["choices"] == []
    assert [chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks] == [3, 3, 3]
    assert (await app.chat())["kv_transfer_params"] == {"r": 1}


# --- reasoning ----------------------------------------------------------------------------------------------------

THOUGHT = "<think>one\ntwo</think>\n\nforty-two"


def cut(text, size):
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("parser", "text"),
    [("qwen3", THOUGHT), ("deepseek_r1", THOUGHT), ("deepseek_r1", THOUGHT.removeprefix("<think>"))],
)
async def test_reasoning_is_separated_however_the_text_is_cut(tmp_path, size, parser, text):
    app = App(tmp_path, says(*cut(text, size)), ["--reasoning-parser", parser])
    message = (await app.chat())["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("one\ntwo", "\n\nforty-two")
    deltas = [chunk["choices"][0]["delta"] for chunk in await app.stream(PATH)]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "one\ntwo"
    assert "".join(delta.get("content", "") for delta in deltas) == "\n\nforty-two"


async def test_reasoning_edge_cases(tmp_path):
    app = App(tmp_path / "a", says("no thought"), ["--reasoning-parser", "qwen3"])
    message = (await app.chat())["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (None, "no thought")
    app = App(tmp_path / "b", says("<think>endless", finish="length"), ["--reasoning-parser", "qwen3"])
    body = await app.chat()
    assert body["choices"][0]["message"] == {
        **body["choices"][0]["message"],
        "reasoning": "endless",
        "content": "",
    }
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    app = App(tmp_path / "c", says(THOUGHT), ["--reasoning-parser", "qwen3"])
    assert (await app.chat(include_reasoning=False))["choices"][0]["message"]["reasoning"] is None
    message = (await app.chat(response_format={"type": "json_object"}))["choices"][0]["message"]
    assert message["content"] == THOUGHT


async def test_a_template_may_open_the_reasoning(tmp_path):
    app = App(
        tmp_path, says("deep</think>done"), ["--reasoning-parser", "qwen3", "--trust-request-chat-template"]
    )
    message = (await app.chat(chat_template="{{ messages[0].content }}<think>\n"))["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("deep", "done")


# --- batches ------------------------------------------------------------------------------------------------------


async def test_a_batch_of_conversations(tmp_path):
    app = App(
        tmp_path,
        lambda call, sample: [Step(call.prompt["prompt"][6:8], [1, 2], "stop")],
        ["--enable-prompt-tokens-details"],
    )
    conversations = [[{"role": "user", "content": name}] for name in ("aa", "bb")]
    reply = await app.post(f"{PATH}/batch", {"messages": conversations, "n": 2})
    body = reply.json()
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [
        (0, "aa"),
        (1, "aa"),
        (2, "bb"),
        (3, "bb"),
    ]
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["prompt_tokens"] == sum(
        len(call.prompt["prompt_token_ids"]) for call in app.engine.calls
    )


async def test_what_a_batch_says_as_a_whole(tmp_path):
    app = App(tmp_path, says(THOUGHT), ["--reasoning-parser", "qwen3"], kv_transfer_params={"a": 1})
    body = {"messages": [HI, HI], "return_token_ids": True, "tools": [TOOL], "tool_choice": "none", "seed": 7}
    reply = (await app.post(f"{PATH}/batch", body, headers={"X-Request-Id": "x"})).json()
    assert reply["id"] == "chatcmpl-x"
    assert [call.request_id for call in app.engine.calls] == ["chatcmpl-x-0", "chatcmpl-x-1"]
    assert [call.params.seed for call in app.engine.calls] == [7, 7]
    assert (reply["prompt_token_ids"], reply["kv_transfer_params"]) == (None, None)
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    one = (await app.post(f"{PATH}/batch", {**body, "messages": [HI]})).json()
    assert one["prompt_token_ids"]
    assert one["kv_transfer_params"] == {"a": 1}


async def test_a_cache_mark_within_one_conversation_of_a_batch_is_its_own(app):
    marked = [{"role": "user", "content": "hi", "cache_control": {"type": "ephemeral"}}]
    await app.post(f"{PATH}/batch", {"messages": [HI, marked]})
    hints = [(call.params.extra_args or {}).get("kv_retention") for call in app.engine.calls]
    assert hints[0] is None
    assert hints[1] is not None


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": [HI] * 1025}, "messages"),
        ({"messages": [HI] * 1000, "n": 17}, "n"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"return_prompt_text": True}, "return_prompt_text"),
    ],
)
async def test_batches_that_are_too_much(app, more, param):
    error = await app.error(f"{PATH}/batch", {"messages": [HI, HI], **more})
    assert (error["code"], error["param"]) == (400, param)
    assert not app.engine.calls


async def test_given_token_ids_are_reported_whatever_else_is_asked_for(app):
    for body in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 1}):
        choice = (await app.chat(logprob_token_ids=[1100], **body))["choices"][0]
        top = choice["logprobs"]["content"][0]["top_logprobs"]
        assert any(entry["logprob"] == -2.5 for entry in top)


async def test_batch_refusals(app):
    assert (await app.error(f"{PATH}/batch", {"messages": [HI], "stream": True}))["param"] == "stream"
    assert (await app.error(f"{PATH}/batch", {"messages": []}))["code"] == 400
    assert (await app.error(f"{PATH}/batch", {"messages": [HI, []]}))["param"] == "messages"


# --- refusals -----------------------------------------------------------------------------------------------------

JSON = {"type": "json_object"}
TOOL = {"type": "function", "function": {"name": "f"}}
BAD = {
    "no messages": ({}, "messages"),
    "empty": ({"messages": []}, "messages"),
    "role": ({"messages": [{"content": "x"}]}, "messages"),
    "content": ({"messages": [{"role": "user"}]}, "messages"),
    "content type": ({"messages": [{"role": "user", "content": 3}]}, "messages"),
    "part": ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages"),
    "tool call": ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages"),
    "arguments": ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "messages"),
    "top_logprobs": ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    "max_tokens": ({"messages": HI, "max_tokens": 0}, "max_tokens"),
    "tool_choice": ({"messages": HI, "tool_choice": "required"}, "tool_choice"),
    "unknown tool": ({"messages": HI, "tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
    "same tools": ({"messages": HI, "tools": [TOOL, TOOL]}, "tools"),
    "auto is off": ({"messages": HI, "tools": [TOOL]}, "tool_choice"),
    "two grammars": ({"messages": HI, "tools": [TOOL], "tool_choice": "required", "response_format": JSON}, "tool_choice"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
async def test_a_bad_field_is_400_and_named(app, case):
    body, param = BAD[case]
    error = await app.error(PATH, body)
    assert (error["code"], error["param"]) == (400, param)


async def test_media_is_422(app):
    part = {"type": "image_url", "image_url": {"url": "http://x"}}
    error = await app.error(PATH, {"messages": [{"role": "user", "content": [part]}]})
    assert (error["code"], error["type"]) == (422, "UnprocessableEntityError")


async def test_errors_in_streams(tmp_path):
    app = App(tmp_path, lambda call, sample: [Step("a", [1]), GenerationError("broken")])
    chunks = await app.stream(PATH)
    assert chunks[-1]["error"]["message"] == "broken"
    app = App(tmp_path, says("a", finish="error", stop_reason="bad"))
    assert (await app.error(PATH, {"messages": HI}))["message"] == "bad"


async def test_without_a_tokenizer_there_is_no_chat(tmp_path):
    app = App(tmp_path, says("x"), ["--tokens-only"])
    assert (await app.error(PATH, {"messages": HI}))["code"] == 400


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_val_06_message_names_the_limit_and_the_request(tmp_path, field):
    app = App(tmp_path, says("a"))
    error = await app.error(PATH, {"messages": [{"role": "user", "content": "hi"}], field: 2047})
    assert error["param"] == field
    assert all(number in error["message"] for number in ("2048", "2047"))
