"""The HTTP layer on the real engine with a tiny random model: both must understand each other."""

import asyncio
import itertools
import json

import httpx
import pytest

from tests.helpers.engine_configs import async_engine_args
from tests.helpers.http_app import events
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.entrypoints.openai.api_server import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

pytestmark = pytest.mark.asyncio(loop_scope="module")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0, "ignore_eos": True}
WEATHER = {
    "type": "object",
    "properties": {"day": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["day"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]


@pytest.fixture(scope="module")
def engine():
    engine_args = async_engine_args(max_logprobs=-1)
    made = AsyncLLM.from_engine_args(engine_args)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def app(engine):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--enable-prompt-tokens-details"])
        yield build_app(args, engine)


@pytest.fixture
async def client(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as made:
        yield made


async def ok(client, path, **body):
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def refused(client, path, **body):
    """The error object of a request that is refused as a bad one, before anything of a stream is sent."""
    reply = await client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["code"] == 400
    return error


async def stream(client, path, **body):
    reply = await client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    return events(reply.text)


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


async def test_stream_and_whole_reply_agree(client):
    body = {
        "prompt": "hello world",
        "max_tokens": 20,
        "logprobs": 2,
        "echo": True,
        "return_token_ids": True,
        **GREEDY,
    }
    whole = (await ok(client, COMPLETIONS, **body))["choices"][0]
    chunks = [chunk["choices"][0] for chunk in await stream(client, COMPLETIONS, **body)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert flat(chunk["token_ids"] for chunk in chunks) == whole["token_ids"]
    for name in ("tokens", "text_offset", "top_logprobs"):
        assert flat(chunk["logprobs"][name] for chunk in chunks) == whole["logprobs"][name]
    assert len(whole["logprobs"]["tokens"]) == len(whole["prompt_token_ids"]) + 20
    assert chunks[-1]["finish_reason"] == whole["finish_reason"] == "length"


async def test_api_06_offsets_find_the_text_of_every_token_also_behind_bytes_that_are_none(client):
    unreadable = 0
    for seed in range(4):
        body = {"prompt": "hello", "max_tokens": 30, "logprobs": 0, "seed": seed, "echo": seed % 2 == 1}
        whole = (await ok(client, COMPLETIONS, **body))["choices"][0]
        text, logprobs = whole["text"], whole["logprobs"]
        unreadable += text.count("\ufffd")
        offsets = logprobs["text_offset"]
        assert offsets == sorted(offsets)
        for token, offset in zip(logprobs["tokens"], offsets, strict=True):
            is_special = len(token) > 2 and token[0] + token[-1] == "<>"  # it has no text
            assert is_special or text.startswith(token, offset)
        chunks = [chunk["choices"][0] for chunk in await stream(client, COMPLETIONS, **body)]
        assert flat(chunk["logprobs"]["text_offset"] for chunk in chunks) == offsets
    assert unreadable > 10


async def test_samples_and_seeds(client):
    body = {"prompt": "hello", "n": 3, "max_tokens": 8, "seed": 1, "temperature": 1.0}
    first, second = await ok(client, COMPLETIONS, **body), await ok(client, COMPLETIONS, **body)
    assert [c["text"] for c in first["choices"]] == [c["text"] for c in second["choices"]]
    assert len({choice["text"] for choice in first["choices"]}) > 1


async def test_api_01_and_06_stop_strings(client):
    text = (await ok(client, COMPLETIONS, prompt="hello", max_tokens=20, **GREEDY))["choices"][0]["text"]
    stop = next(
        text[i : i + 2]
        for i in range(3, len(text))
        if "\ufffd" not in text[i : i + 2] and text.index(text[i : i + 2]) == i
    )
    for include in (False, True):
        body = {
            "prompt": "hello",
            "max_tokens": 20,
            "stop": [stop],
            "include_stop_str_in_output": include,
            "logprobs": 0,
            **GREEDY,
        }
        whole = (await ok(client, COMPLETIONS, **body))["choices"][0]
        chunks = [chunk["choices"][0] for chunk in await stream(client, COMPLETIONS, **body)]
        expected = text[: text.index(stop)] + (stop if include else "")
        assert whole["text"] == "".join(chunk["text"] for chunk in chunks) == expected
        assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", stop)
        assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == ("stop", stop)
        assert all(chunk["text"] for chunk in chunks[:-1])
        offsets = whole["logprobs"]["text_offset"]
        assert offsets == flat(chunk["logprobs"]["text_offset"] for chunk in chunks)
        assert offsets == sorted(offsets)
        assert offsets[-2:] == [len(text[: text.index(stop)]) + n * include for n in range(2)]


async def test_api_04_a_prompt_that_ends_inside_a_character(client, engine):
    tokenizer = await engine.get_tokenizer()
    ids = tokenizer.encode("Hello world 語")
    letter = tokenizer.encode("a")[-1]
    assert "語" not in tokenizer.decode(ids[:-1]), "the last token completes the character"
    for answer, expected in ((ids[-1], "語"), (letter, "a")):
        body = {"prompt": ids[:-1], "max_tokens": 1, "allowed_token_ids": [answer], **GREEDY}
        whole = (await ok(client, COMPLETIONS, **body))["choices"][0]["text"]
        texts = [chunk["choices"][0]["text"] for chunk in await stream(client, COMPLETIONS, **body)]
        assert whole == "".join(texts)
        assert whole.strip("\ufffd") == expected
        assert "Hello" not in whole


async def test_cached_tokens_and_resets(client):
    body = {"prompt": [5 + n % 200 for n in range(40)], "max_tokens": 2, **GREEDY}
    await client.post("/reset_prefix_cache")
    counts = [
        (await ok(client, COMPLETIONS, **body))["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert counts == [0, 32]
    report = (await client.post("/reset_prefix_cache?reset_external=true")).json()
    assert (report["success"], report["reason"], report["held_blocks"]) == (True, None, 0)
    assert (await ok(client, COMPLETIONS, **body))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    chunks = await stream(
        client, COMPLETIONS, **body, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    assert {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks} == {32}


async def test_val_07_scoring_a_prompt_of_the_models_length(client, engine):
    limit = engine.model_config.max_model_len
    ids = [5 + (7 * n) % 200 for n in range(limit)]
    body = {"max_tokens": 0, "echo": True, "logprobs": 1}
    full = (await ok(client, COMPLETIONS, prompt=ids, **body))["choices"][0]["logprobs"]
    shorter = (await ok(client, COMPLETIONS, prompt=ids[:-1], **body))["choices"][0]["logprobs"]
    assert len(full["tokens"]) == limit
    assert full["token_logprobs"][1:-1] == pytest.approx(shorter["token_logprobs"][1:], abs=1e-4)
    every = {"max_tokens": 1, "logprobs": -1, "return_tokens_as_token_ids": True, "temperature": 0}
    top = (await ok(client, COMPLETIONS, prompt=ids[:-1], **every))["choices"][0]["logprobs"]["top_logprobs"][
        0
    ]
    assert full["token_logprobs"][-1] == pytest.approx(top[f"token_id:{ids[-1]}"], abs=1e-4)
    one = (await ok(client, COMPLETIONS, prompt=ids[:-1], max_tokens=1, **GREEDY))["choices"][0]
    assert one["finish_reason"] == "length"
    assert str(limit) in (await refused(client, COMPLETIONS, prompt=ids, max_tokens=1))["message"]


COUNTED = {
    "plain": (COMPLETIONS, {"prompt": "hello", "max_tokens": 4}),
    "stop string": (COMPLETIONS, {"prompt": "hello", "max_tokens": 40, "stop": ["a", "e", "s"]}),
    "samples": (COMPLETIONS, {"prompt": "hello", "max_tokens": 3, "n": 3, "temperature": 1, "seed": 1}),
    "several prompts": (COMPLETIONS, {"prompt": ["hello", "there"], "max_tokens": 3}),
    "structured": (
        CHAT,
        {"messages": [{"role": "user", "content": "hi"}], "structured_outputs": {"json": WEATHER}},
    ),
    "tool": (
        CHAT,
        {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": "required"},
    ),
    "no tokens": (COMPLETIONS, {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 1}),
    "no tokens of samples": (
        COMPLETIONS,
        {"prompt": "hello", "max_tokens": 0, "n": 2, "temperature": 1, "echo": True},
    ),
}


@pytest.mark.parametrize("case", [*COUNTED, "no tokens, prompt of the model's length"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_metrics_count_the_tokens_that_replies_report(client, engine, case, streamed):
    long = {"prompt": [5] * engine.model_config.max_model_len, "max_tokens": 0}
    path, body = COUNTED.get(case, (COMPLETIONS, long))
    before = await token_counts(client)
    if streamed:
        body = {**body, "stream_options": {"include_usage": True}}
        usage = (await stream(client, path, **body))[-1]["usage"]
    else:
        usage = (await ok(client, path, **body))["usage"]
    counted = [after - start for after, start in zip(await token_counts(client), before, strict=True)]
    prompt, generated = usage["prompt_tokens"], usage["completion_tokens"]
    assert (generated == 0) == (body.get("max_tokens") == 0)
    assert counted == [prompt, prompt, generated, generated, prompt * body.get("n", 1)]


async def token_counts(client):
    """Tokens of prompts, twice, of outputs, of outputs by request, and of prompts by engine request."""
    names = (
        "prompt_tokens_total",
        "prompt_tokens_by_source_total",
        "generation_tokens_total",
        "request_generation_tokens_sum",
        "request_prompt_tokens_sum",
    )
    lines = (await client.get("/metrics")).text.splitlines()
    return [
        sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))
        for name in names
    ]


BAD = {
    "val_01_bias_beyond": ({"logit_bias": {"191222": -100}}, "191222"),
    "val_01_bias_text": ({"logit_bias": {"AI": -100}}, "AI"),
    "val_01_bias_negative": ({"logit_bias": {"-1": 1}}, "-1"),
    "val_03_regex": ({"structured_outputs": {"regex": "["}}, "regex"),
    "val_03_json": ({"structured_outputs": {"json": ""}}, "json"),
    "val_03_json_object": ({"structured_outputs": {"json_object": False}}, "json_object"),
    "val_03_choice": ({"structured_outputs": {"choice": []}}, "choice"),
    "val_03_grammar": ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs"),
    "allowed": ({"allowed_token_ids": [10**6]}, "1000000"),
    "stop_ids": ({"stop_token_ids": [10**6]}, "1000000"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("streamed", [False, True])
async def test_val_01_and_03_bad_input_is_400_and_others_go_on(client, case, streamed):
    fields, word = BAD[case]
    good = asyncio.create_task(ok(client, COMPLETIONS, prompt="hello", max_tokens=10, **GREEDY))
    reply = await client.post(COMPLETIONS, json={"prompt": "x", "stream": streamed, **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert word in error["message"]
    assert (await good)["usage"]["completion_tokens"] == 10


async def test_val_10_tiny_temperature_is_finite_and_acts_greedy(client):
    asked = {"prompt": "hello", "max_tokens": 24, "logprobs": 0, "ignore_eos": True, "seed": 5}
    body = await ok(client, COMPLETIONS, temperature=1e-4, **asked)
    assert all(value > -100 for value in body["choices"][0]["logprobs"]["token_logprobs"])
    greedy = await ok(client, COMPLETIONS, temperature=0, **asked)
    assert body["choices"][0]["text"] == greedy["choices"][0]["text"]


async def test_structured_answers(client):
    schema = {"name": "x", "schema": {"enum": ["aa", "bb"]}}
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    assert json.loads((await ok(client, CHAT, **body))["choices"][0]["message"]["content"]) in ("aa", "bb")
    choice = await ok(client, COMPLETIONS, prompt="x", structured_outputs={"choice": ["yes", "no"]})
    assert choice["choices"][0]["text"] in ("yes", "no")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_api_10_forced_tool_calls(client, choice):
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "seed": 3,
        "parallel_tool_calls": False,
    }
    message = (await ok(client, CHAT, **body))["choices"][0]["message"]
    function = message["tool_calls"][0]["function"]
    assert function["name"] == "weather"
    assert 0 <= json.loads(function["arguments"])["day"] <= 9
    deltas = [
        chunk["choices"][0]["delta"].get("tool_calls", []) for chunk in await stream(client, CHAT, **body)
    ]
    pieces = [delta["function"]["arguments"] for delta in flat(deltas)]
    assert "".join(pieces) == function["arguments"]


async def test_conversations_stream_as_they_answer(client):
    body = {"messages": [{"role": "user", "content": "tell me"}], "max_tokens": 15, **GREEDY}
    whole = (await ok(client, CHAT, **body))["choices"][0]
    chunks = [chunk["choices"][0] for chunk in await stream(client, CHAT, **body)]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == whole["message"]["content"]
    assert chunks[0]["delta"]["role"] == "assistant"
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]


async def test_requests_can_be_aborted_by_their_id(client):
    body = {"prompt": "hello", "max_tokens": 200, "request_id": "victim", **GREEDY}
    task = asyncio.create_task(client.post(COMPLETIONS, json=body))
    for _ in range(100):
        await asyncio.sleep(0.005)
        await client.post("/abort_requests", json={"request_ids": ["cmpl-victim"]})
        if task.done():
            break
    choice = (await task).json()["choices"][0]
    assert choice["finish_reason"] in ("abort", "length")


async def test_pause_and_resume(client):
    assert (await client.post("/pause?mode=keep&clear_cache=false")).json() == {"status": "paused"}
    assert (await client.get("/is_paused")).json() == {"is_paused": True}
    task = asyncio.create_task(ok(client, COMPLETIONS, prompt="hello", max_tokens=2))
    await asyncio.sleep(0.05)
    assert not task.done()
    assert (await client.post("/resume")).json() == {"status": "resumed"}
    assert (await task)["usage"]["completion_tokens"] > 0


async def test_server_info_and_metrics(client):
    info = (await client.get("/server_info?config_format=json")).json()
    assert info["vllm_config"]["cache_config"]["cache_hit_alignment_tokens"] == 16
    assert info["kv_cache_groups"][0]["kind"] == "full_attention"
    assert "vllm:prefix_cache_queries_total" in (await client.get("/metrics")).text
    assert (await client.get("/kv_event_sources")).json() == {}
    asked = {"endpoint-load-metrics-format": "json"}
    reply = await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}, headers=asked)
    load = json.loads(reply.headers["endpoint-load-metrics"].removeprefix("JSON "))["named_metrics"]
    assert load.keys() == {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
    assert load["num_requests_waiting"] == 0
    assert (await client.get("/health")).status_code == 200


async def test_many_at_once(client):
    bodies = [{"prompt": f"number {n}", "max_tokens": 3 + n % 4, **GREEDY} for n in range(24)]
    replies = await asyncio.gather(*(ok(client, COMPLETIONS, **body) for body in bodies))
    assert [reply["usage"]["completion_tokens"] for reply in replies] == [
        body["max_tokens"] for body in bodies
    ]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "((((a{100}){100}){100}){100})"},
        {"json": {"properties": {f"p{number}": {"type": "string"} for number in range(5000)}}},
        {"choice": [1]},
        {"json": 5},
        {"json_object": "yes"},
        {"regex": "a", "whitespace_pattern": 5},
    ],
    ids=lambda value: next(iter(value)),
)
async def test_a_constraint_that_cannot_be_met_is_a_bad_request(client, constraint, streams):
    error = await refused(client, COMPLETIONS, prompt="x", structured_outputs=constraint, stream=streams)
    assert "<state>" not in error["message"]
    assert (await ok(client, COMPLETIONS, prompt="x", max_tokens=2, **GREEDY))["choices"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": [7] * 1_000_000}),
        ("/inference/v1/generate", {"token_ids": [7] * 1_000_000}),
        ("/kv_cache/lookup", {"token_ids": [7] * 1_000_000}),
    ],
)
async def test_a_million_token_ids_are_a_bad_request(client, path, body):
    error = await refused(client, path, **body)
    assert "max_model_len" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/collective_rpc", {"method": "no_such"}, "no method 'no_such'"),
        ("/collective_rpc", {"method": "__class__"}, "no method"),
        ("/collective_rpc", {"method": "worker"}, "no method"),
        ("/collective_rpc", {"method": "check_health", "args": [1]}, "does not take these arguments"),
        ("/collective_rpc", {"method": "check_health", "kwargs": {"a": 1}}, "does not take these arguments"),
        ("/release_kv_cache_memory", {}, "needs a completed pause"),
        ("/sleep?level=7", {}, "level"),
        ("/sleep?level=2", {}, "level 2"),
        ("/collective_rpc", {"method": "shutdown"}, "by the engine itself"),
        ("/sleep?mode=x", {}, "mode"),
        ("/pause?mode=x", {}, "mode"),
        ("/wake_up?tags=x", {}, "tags"),
        ("/abort_requests", {"request_ids": [1]}, "request_ids"),
        ("/abort_requests", {}, "request_ids"),
    ],
)
async def test_control_calls_that_cannot_be_are_bad_requests_and_no_defects(client, path, body, words, capfd):
    assert words in (await refused(client, path, **body))["message"]
    assert 'core_proc.py", line' not in "".join(capfd.readouterr()), "no stack of the core"
    assert (await client.get("/is_paused")).json() == {"is_paused": False}


@pytest.mark.parametrize("streams", [False, True])
async def test_log_probabilities_of_forbidden_tokens_are_numbers_of_json(client, streams):
    params = {"max_tokens": 2, "logprobs": 5, "structured_outputs": {"choice": ["a", "b"]}}
    body = {"token_ids": [5, 6, 7], "sampling_params": params, "stream": streams}
    reply = await client.post("/inference/v1/generate", json=body)
    assert reply.status_code == 200, reply.text
    replies = events(reply.text) if streams else [reply.json()]
    positions = [entry for part in replies for entry in part["choices"][0]["logprobs"]]
    values = [value["logprob"] for position in positions for value in position.values()]
    assert min(values) == -9999.0


async def test_a_grammar_that_other_fields_contradict_names_itself(client):
    body = {"prompt": "x", "allowed_token_ids": [1], "structured_outputs": {"choice": ["a"]}}
    assert (await refused(client, COMPLETIONS, **body))["param"] == "structured_outputs"


@pytest.mark.parametrize("streams", [False, True])
async def test_log_probabilities_of_given_prompt_tokens_are_delivered(client, streams):
    params = {"max_tokens": 2, "prompt_logprob_token_ids": [5, 6], "prompt_logprobs": 0}
    body = {"token_ids": [5, 6, 7], "sampling_params": params, "stream": streams}
    reply = await client.post("/inference/v1/generate", json=body)
    assert reply.status_code == 200, reply.text
    part = events(reply.text)[0] if streams else reply.json()
    scores = part["prompt_token_id_logprobs"]
    assert [len(row) for row in scores] == [2, 2]
    assert scores[0][1] == pytest.approx(part["prompt_logprobs"][1]["6"]["logprob"])


async def test_sleeping_and_resuming_serves_as_before(client):
    body = {"prompt": "to sleep", "max_tokens": 4, **GREEDY}
    before = await ok(client, COMPLETIONS, **body)
    for sleeping, waking in itertools.product(
        (["/sleep"], ["/pause", "/release_kv_cache_memory"]),
        (["/resume"], ["/wake_up?tags=scheduling"], ["/wake_up?tags=weights", "/wake_up?tags=kv_cache"]),
    ):
        for path in (*sleeping, *waking):
            assert (await client.post(path)).status_code == 200
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
        after = await ok(client, COMPLETIONS, **body)
        assert after["choices"] == before["choices"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_prompt_that_can_never_fit_the_kv_cache_is_a_bad_request_and_others_go_on():
    # Three usable blocks of 16 tokens, though the model takes 256.
    small = AsyncLLM.from_engine_args(
        async_engine_args(num_gpu_blocks_override=4, max_model_len=256, enable_prefix_caching=False)
    )
    try:
        args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
        transport = httpx.ASGITransport(build_app(args, small), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            for streams in (False, True):
                error = await refused(client, COMPLETIONS, prompt=[7] * 100, stream=streams, **GREEDY)
                assert error["type"] == "BadRequestError"
                assert "KV cache" in error["message"]
            assert (await ok(client, COMPLETIONS, prompt=[7] * 20, max_tokens=3, **GREEDY))["choices"]
    finally:
        small.shutdown()


async def test_a_grammar_at_its_end_ends_the_request_whatever_else_it_asks_for(client):
    body = {"prompt": "x", "structured_outputs": {"choice": ["ab"]}, "max_tokens": 20}
    for more in ({"min_tokens": 10}, {"ignore_eos": True}):
        choice = (await ok(client, COMPLETIONS, **body, **more))["choices"][0]
        assert choice["text"] == "ab"
    error = await refused(client, COMPLETIONS, **body, allowed_token_ids=[70])
    assert "grammar" in error["message"]
