"""`/v1/completions` against a scripted engine: parameters, whole replies, streams, usage, log probabilities."""

import pytest

from tests.helpers.fake_engine import Step
from tests.helpers.http_app import App, says
from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind

PATH = "/v1/completions"


@pytest.fixture
def app(tmp_path):
    return App(tmp_path, says("foo", " bar"))


async def test_a_whole_reply(app):
    body = await app.complete(max_tokens=4, temperature=0.5, seed=3)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("foo bar", "stop", None)
    assert body["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
        "prompt_tokens_details": None, "completion_tokens_details": None,
    }  # fmt: skip
    assert (body["object"], body["model"]) == ("text_completion", "m")
    assert body["id"].startswith("cmpl-")
    params = app.call.params
    assert (params.max_tokens, params.temperature, params.seed, params.n) == (4, 0.5, 3, 1)
    assert params.output_kind is RequestOutputKind.FINAL_ONLY
    assert app.call.prompt["prompt"] == "hello"
    assert app.call.ended == "finished"


async def test_the_stream_says_the_same(app):
    chunks = await app.stream(PATH, max_tokens=4)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "foo bar"
    assert [choice["finish_reason"] for choice in choices] == [None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    assert app.call.params.output_kind is RequestOutputKind.DELTA


async def test_every_field_reaches_the_engine(app):
    await app.complete(
        n=2, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.2,
        stop=["x"], stop_token_ids=[7], ignore_eos=True, min_tokens=1, max_tokens=9, logit_bias={"5": 200}, bad_words=["no"],
        allowed_token_ids=[5, 6], include_stop_str_in_output=True, skip_special_tokens=False, spaces_between_special_tokens=False,
        priority=3, cache_salt="s", session_id="S", kv_transfer_params={"a": 1}, vllm_xargs={"b": 2}, logprob_token_ids=[9],
        thinking_token_budget=-1, repetition_detection={"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}, stream_interval=2,
        structured_outputs={"regex": "a+"}, user="u",
    )  # fmt: skip
    p = app.call.params
    assert (p.n, p.top_p, p.top_k, p.min_p, p.repetition_penalty) == (2, 0.9, 5, 0.1, 1.1)
    assert (p.presence_penalty, p.frequency_penalty, p.stop, p.stop_token_ids) == (0.1, 0.2, ["x"], [7])
    assert (p.ignore_eos, p.min_tokens, p.logit_bias, p.bad_words, p.allowed_token_ids) == (
        True,
        1,
        {5: 100.0},
        ["no"],
        [5, 6],
    )
    assert (p.include_stop_str_in_output, p.skip_special_tokens, p.spaces_between_special_tokens) == (
        True,
        False,
        False,
    )
    assert (p.extra_args, p.logprob_token_ids, p.thinking_token_budget) == (
        {"b": 2, "kv_transfer_params": {"a": 1}},
        [9],
        None,
    )
    assert (p.repetition_detection.min_count, p.stream_interval, p.structured_outputs.regex) == (2, 2, "a+")
    assert app.call.options["priority"] == 3
    assert (app.call.options["cache_salt"], app.call.options["session_id"]) == ("s", "S")


async def test_headers_of_the_caller(app):
    headers = {
        "X-Request-Id": "abc",
        "X-Vllm-Priority": "-2",
        "X-Session-ID": "S",
        "X-data-parallel-rank": "0",
    }
    reply = await app.post(PATH, {"prompt": "hello"}, headers=headers)
    assert reply.json()["id"] == "cmpl-abc"
    assert app.call.request_id == "cmpl-abc"
    options = app.call.options
    assert (options["priority"], options["session_id"], options["data_parallel_rank"]) == (-2, "S", 0)
    error = await app.error(PATH, {"prompt": "hello"}, headers={"X-Vllm-Priority": "high"})
    assert (error["code"], error["param"]) == (400, "X-Vllm-Priority")


@pytest.mark.parametrize("name", ["X-Vllm-Priority", "X-data-parallel-rank"])
@pytest.mark.parametrize("text", ["1_0", "+1", " 1", "--1", "1.0", "\u0661", "\u00b2", "", "1" * 19, "0x1"])
async def test_numbers_in_headers_are_plain_digits(app, name, text):
    headers = [(name.lower().encode(), text.encode("utf-8"))]
    if text == " 1":  # stripped where it comes from the network
        headers = [(name.lower().encode(), b"\xa01")]
    error = await app.error(PATH, {"prompt": "hello"}, headers=headers)
    assert (error["code"], error["param"]) == (400, name)
    assert "must be an integer" in error["message"]


async def test_several_prompts_and_samples_are_numbered(tmp_path):
    app = App(tmp_path, lambda call, sample: [Step(f"{call.prompt['prompt']}{sample}", [1, 2], "stop")])
    body = await app.complete(prompt=["a", "b"], n=2)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert body["usage"]["completion_tokens"] == 8
    chunks = await app.stream(PATH, prompt=["a", "b"], n=2)
    assert sorted((c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks) == [
        (0, "a0"),
        (1, "a1"),
        (2, "b0"),
        (3, "b1"),
    ]


async def test_token_ids_as_prompts(app):
    body = await app.complete(prompt=[5, 6, 7], return_token_ids=True)
    choice = body["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6, 7], [100, 101])
    await app.complete(prompt=[[5], [6, 7]])
    assert [call.prompt["prompt_token_ids"] for call in app.engine.calls[-2:]] == [[5], [6, 7]]
    chunks = await app.stream(PATH, prompt=[5, 6], return_token_ids=True)
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks] == [[5, 6], None]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[100], [101]]


# --- stop strings and empty pieces --------------------------------------------------------------------------------


async def test_api_01_stop_string_reason_is_the_same_in_both_forms(tmp_path):
    app = App(tmp_path, says("fo", "", "o", finish="stop", stop_reason="END"))
    whole = (await app.complete(stop=["END"]))["choices"][0]
    chunks = await app.stream(PATH, stop=["END"])
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == ("foo", "stop", "END")
    last = chunks[-1]["choices"][0]
    assert ("".join(c["choices"][0]["text"] for c in chunks), last["finish_reason"], last["stop_reason"]) == (
        "foo",
        "stop",
        "END",
    )


async def test_api_01_tokens_only_refuses_stop_strings(tmp_path):
    app = App(tmp_path, says("", finish="length"), ["--tokens-only"])
    error = await app.error(
        "/inference/v1/generate", {"token_ids": [1], "sampling_params": {"stop": ["END"]}}
    )
    assert (error["code"], error["param"]) == (400, "sampling_params.stop")


async def test_api_03_no_chunk_without_text_but_no_token_lost(tmp_path):
    app = App(tmp_path, says("a", "", "", "b", ""))
    chunks = await app.stream(PATH, return_token_ids=True, logprobs=0)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["a", "b", ""]
    assert [choice["token_ids"] for choice in choices] == [[100], [101, 102, 103], [104]]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [1, 3, 1]
    assert choices[-1]["finish_reason"] == "stop"


# --- echo, log probabilities, offsets -----------------------------------------------------------------------------


def merged(chunks):
    """Text and log probabilities of a stream, put together again."""
    total = {"text": "", "text_offset": [], "tokens": [], "token_logprobs": [], "top_logprobs": []}
    for chunk in chunks:
        choice = chunk["choices"][0]
        total["text"] += choice["text"]
        for name in ("text_offset", "tokens", "token_logprobs", "top_logprobs"):
            total[name] += choice["logprobs"][name]
    return total


async def test_api_06_offsets_count_code_points_and_agree_in_both_forms(tmp_path):
    app = App(tmp_path, says("x", "é", "yz"))
    body = {"prompt": "abé", "echo": True, "logprobs": 1}
    whole = (await app.complete(**body))["choices"][0]
    assert whole["text"] == "abéxéyz"
    logprobs = whole["logprobs"]
    generated = logprobs["text_offset"][-3:]
    assert generated == [3, 4, 5]
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert logprobs["text_offset"][0] == 0
    assert logprobs["token_logprobs"][0] is None
    streamed = merged(await app.stream(PATH, **body))
    assert streamed == {"text": whole["text"], **logprobs}


async def test_api_06_offsets_stay_within_a_text_that_a_stop_string_cut(tmp_path):
    """The tokens of the stop string are reported, their text is not."""
    steps = [Step("f", [102]), Step("oo", [111, 111, 69]), Step("", [78, 68], "stop", "END")]
    app = App(tmp_path, lambda call, sample: steps)
    app.engine.position = lambda token: {token: Logprob(-0.5, 1, chr(token))}
    whole = (await app.complete(logprobs=0, stop=["END"]))["choices"][0]
    assert (whole["text"], whole["logprobs"]["tokens"]) == ("foo", list("fooEND"))
    assert whole["logprobs"]["text_offset"] == [0, 1, 2, 3, 3, 3]
    streamed = merged(await app.stream(PATH, logprobs=0, stop=["END"]))
    assert streamed["text_offset"] == whole["logprobs"]["text_offset"]


async def test_offsets_begin_at_zero_without_echo(app):
    logprobs = (await app.complete(logprobs=1))["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["text_offset"]) == (["foo", " bar"], [0, 3])
    assert logprobs["token_logprobs"] == [-0.25, -0.25]
    assert logprobs["top_logprobs"][0] == {"foo": -0.25, "alt100": -2.5}


@pytest.mark.parametrize("logprobs", [None, 0, 1])
async def test_given_token_ids_are_reported_whatever_else_is_asked_for(app, logprobs):
    body = await app.complete(logprobs=logprobs, logprob_token_ids=[1100])
    assert body["choices"][0]["logprobs"]["top_logprobs"][0] == {"foo": -0.25, "alt100": -2.5}


async def test_logprobs_zero_reports_the_taken_token_only(app):
    logprobs = (await app.complete(logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"foo": -0.25}, {" bar": -0.25}]


async def test_tokens_may_be_shown_as_ids(tmp_path):
    app = App(tmp_path, says("foo"), ["--return-tokens-as-token-ids"])
    assert (await app.complete(logprobs=0))["choices"][0]["logprobs"]["tokens"] == ["token_id:100"]
    assert (await app.complete(logprobs=0, return_tokens_as_token_ids=False))["choices"][0]["logprobs"][
        "tokens"
    ] == ["foo"]


async def test_prompt_logprobs(app):
    positions = (await app.complete(prompt=[5, 6], prompt_logprobs=1))["choices"][0]["prompt_logprobs"]
    assert positions[0] is None
    assert set(positions[1]["6"]) == {"logprob", "rank", "decoded_token"}
    assert (await app.error(PATH, {"prompt": "a", "prompt_logprobs": 1, "stream": True}))[
        "param"
    ] == "prompt_logprobs"
    assert (await app.error(PATH, {"prompt": "a", "prompt_logprobs": -2}))["param"] == "prompt_logprobs"


async def test_echo_of_token_ids_is_their_text(app):
    ids = app.engine.tokenizer.encode("hello")
    assert (await app.complete(prompt=ids, echo=True))["choices"][0]["text"] == "hellofoo bar"


async def test_infinite_log_probabilities_are_valid_json(tmp_path):
    app = App(tmp_path, says("a"))
    body = await app.complete(logprobs=1)
    assert body["choices"][0]["logprobs"]["token_logprobs"][0] >= -9999.0


# --- usage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 2])
async def test_api_07_streamed_usage_counts_tokens_once(tmp_path, samples):
    app = App(tmp_path, says(*["x"] * 197, finish="length"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await app.stream(PATH, n=samples, max_tokens=300, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[:-1] == list(range(1, 197 * samples + 1))
    assert chunks[-1]["choices"] == []
    whole = (await app.complete(n=samples, max_tokens=300))["usage"]
    final = chunks[-1]["usage"]
    assert final["completion_tokens"] == whole["completion_tokens"] == 197 * samples
    assert final["total_tokens"] == final["prompt_tokens"] + final["completion_tokens"]


async def test_api_07_a_chunk_of_several_tokens_counts_them_all(tmp_path):
    steps = [Step("ab", [1, 2, 3]), Step("c", [4]), Step("de", [5, 6], "length")]  # as drafts are accepted
    app = App(tmp_path, lambda call, sample: steps)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await app.stream(PATH, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [3, 4, 6, 6]
    assert (await app.complete())["usage"]["completion_tokens"] == 6


async def test_usage_comes_at_the_end_only_unless_asked_for(app):
    chunks = await app.stream(PATH, stream_options={"include_usage": True})
    assert ["usage" in chunk for chunk in chunks] == [False, False, True]


async def test_forced_usage_adds_the_final_chunk_only(tmp_path):
    app = App(tmp_path, says("a", "b"), ["--enable-force-include-usage"])
    assert ["usage" in chunk for chunk in await app.stream(PATH)] == [False, False, True]


async def test_met_08_cached_tokens_are_in_every_usage_object(tmp_path):
    app = App(tmp_path, says("a", "b", "c"), ["--enable-prompt-tokens-details"], cached_tokens=2)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await app.stream(PATH, stream_options=options)
    assert [chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks] == [2, 2, 2, 2]


async def test_cached_tokens_of_several_prompts_are_added_up(tmp_path):
    app = App(tmp_path, says("a"), ["--enable-prompt-tokens-details"], cached_tokens=2)
    usage = (await app.complete(prompt=["aaa", "bbb"]))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4
    chunks = await app.stream(PATH, prompt=["aaa", "bbb"], stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert chunks[-1]["usage"]["prompt_tokens"] == usage["prompt_tokens"]


async def test_the_connectors_answer_comes_with_the_last_chunk(tmp_path):
    app = App(tmp_path, says("a", "b"), kv_transfer_params={"remote": 1})
    assert (await app.complete())["kv_transfer_params"] == {"remote": 1}
    chunks = await app.stream(PATH)
    assert [chunk.get("kv_transfer_params") for chunk in chunks] == [None, {"remote": 1}]


# --- limits -------------------------------------------------------------------------------------------------------


async def test_val_06_message_names_the_limit_the_prompt_and_the_request(app):
    error = await app.error(PATH, {"prompt": list(range(5, 13)), "max_tokens": 2045})
    assert error["param"] == "max_tokens"
    assert all(number in error["message"] for number in ("2048", " 8 ", "2045"))
    await app.complete(prompt=list(range(5, 13)), max_tokens=2040)
    assert app.call.params.max_tokens == 2040


@pytest.mark.parametrize(
    ("length", "max_tokens", "status"),
    [
        (2047, 1, 200),
        (2047, None, 200),
        (2048, 1, 400),
        (2048, None, 400),
        (2049, 1, 400),
        (2048, 0, 200),
        (2049, 0, 400),
    ],
)
async def test_val_07_prompts_round_the_models_length(app, length, max_tokens, status):
    reply = await app.post(PATH, {"prompt": [5] * length, "max_tokens": max_tokens})
    assert reply.status_code == status, reply.text


async def test_default_max_tokens_shrinks_to_what_fits(app):
    await app.complete(prompt=[5] * 2040)
    assert app.call.params.max_tokens == 8
    await app.complete(prompt=[5] * 8)
    assert app.call.params.max_tokens == 16
    await app.complete(prompt=[5] * 8, max_tokens=None)
    assert app.call.params.max_tokens == 2040


async def test_scoring_returns_no_generated_token(app):
    body = await app.complete(prompt=[5, 6, 7], max_tokens=0, echo=True, logprobs=1, return_token_ids=True)
    choice = body["choices"][0]
    assert (len(choice["logprobs"]["tokens"]), choice["token_ids"], body["usage"]["completion_tokens"]) == (
        3,
        [],
        0,
    )
    assert choice["text"] == app.engine.tokenizer.decode([5, 6, 7])
    assert app.call.params.max_tokens == 1


async def test_scoring_of_a_full_prompt_forces_its_last_token(tmp_path):
    app = App(tmp_path, lambda call, sample: [Step("Z", call.params.allowed_token_ids, "length")])
    ids = [5 + number % 7 for number in range(2048)]
    body = await app.complete(prompt=ids, max_tokens=0, echo=True, logprobs=1)
    logprobs = body["choices"][0]["logprobs"]
    assert app.call.prompt["prompt_token_ids"] == ids[:-1]
    assert app.call.params.allowed_token_ids == [ids[-1]]
    assert (len(logprobs["tokens"]), logprobs["token_logprobs"][-1], logprobs["tokens"][-1]) == (
        2048,
        -0.25,
        "Z",
    )
    assert body["usage"] == {**body["usage"], "prompt_tokens": 2048, "completion_tokens": 0}


async def test_scoring_of_a_full_prompt_needs_raw_log_probabilities(tmp_path):
    app = App(tmp_path, says("Z"), ["--logprobs-mode", "processed_logprobs"])
    error = await app.error(PATH, {"prompt": [5] * 2048, "max_tokens": 0})
    assert "raw log probabilities" in error["message"]


@pytest.mark.parametrize(("side", "expected"), [(None, [8, 9]), ("left", [8, 9]), ("right", [5, 6])])
async def test_truncation(app, side, expected):
    body = {"prompt": [5, 6, 7, 8, 9], "truncate_prompt_tokens": 2}
    await app.complete(**body, **({} if side is None else {"truncation_side": side}))
    assert app.call.prompt["prompt_token_ids"] == expected


async def test_truncation_limits(app):
    await app.complete(prompt=[5] * 5000, truncate_prompt_tokens=-1, max_tokens=1)
    assert len(app.call.prompt["prompt_token_ids"]) == 2047
    for bad in (0, 5000, -2):
        assert (await app.error(PATH, {"prompt": [5], "truncate_prompt_tokens": bad}))[
            "param"
        ] == "truncate_prompt_tokens"
