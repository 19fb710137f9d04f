"""What surrounds the endpoints: keys, headers, sizes, figures, errors, models, tokens, routes that do not exist."""

import pytest

from tests.helpers.http_app import App, says
from vllm.entrypoints.openai.errors import clean_message, create_error_response, describe_validation
from vllm.entrypoints.openai.middleware import stated_length
from vllm.entrypoints.openai.unsupported_routes import PATHS
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response as public_create
from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler
from vllm.version import __version__


@pytest.fixture
def app(tmp_path):
    return App(tmp_path, says("foo"))


# --- plain routes -------------------------------------------------------------------------------------------------


async def test_health_ping_and_version(app):
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        reply = await app.client.request(method, path)
        assert (reply.status_code, reply.content) == (200, b"")
    assert (await app.client.get("/version")).json() == {"version": __version__}


async def test_a_dead_engine_is_unhealthy(app):
    app.engine.dead = True
    for path in ("/health", "/ping"):
        reply = await app.client.get(path)
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "ServiceUnavailableError")
    assert (await app.client.get("/version")).status_code == 200


async def test_models(app):
    body = (await app.client.get("/v1/models")).json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["m", "other"]
    card = body["data"][0]
    assert (card["max_model_len"], card["owned_by"], card["object"], len(card["permission"])) == (
        2048,
        "vllm",
        "model",
        1,
    )


async def test_kv_event_sources(app):
    app.engine.answers["get_kv_event_sources"] = {"0": {"endpoint": "tcp://*:5557"}}
    assert (await app.client.get("/kv_event_sources")).json() == {"0": {"endpoint": "tcp://*:5557"}}


async def test_metrics_count_requests_by_known_route(app):
    await app.complete()
    await app.client.get("/no/such/path")
    await app.client.get("/health")
    text = (await app.client.get("/metrics")).text
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.0' in text
    assert 'http_requests_total{handler="none",method="GET",status="4xx"} 1.0' in text
    assert 'handler="/health"' not in text
    assert "http_request_duration_seconds_count" in text


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (b"12", 12),
        (b"0012", 12),
        (b"0", 0),
        (b"1_2", 0),
        (b"+12", 0),
        (b"\xb2", 0),
        (b"9" * 5000, int("9" * 20)),
        (None, 0),
    ],
)
def test_the_stated_length_of_a_body_is_plain_digits(stated, expected):
    headers = [] if stated is None else [(b"content-length", stated)]
    assert stated_length({"headers": headers}) == expected


async def test_load_needs_its_flag(app, tmp_path):
    assert (await app.client.get("/load")).status_code == 501
    counted = App(tmp_path / "b", says("foo"), ["--enable-server-load-tracking"])
    assert (await counted.client.get("/load")).json() == {"server_load": 0}
    await counted.complete()
    assert (await counted.client.get("/load")).json() == {"server_load": 0}


async def test_tokenizer_info_needs_its_flag(app, tmp_path):
    assert (await app.client.get("/tokenizer_info")).status_code == 404
    shown = App(tmp_path / "b", says("foo"), ["--enable-tokenizer-info-endpoint"])
    info = (await shown.client.get("/tokenizer_info")).json()
    assert info["special_tokens"]["bos_token"] == "<s>"
    assert info["vocab_size"] > 256


@pytest.mark.parametrize("path", sorted(PATHS))
async def test_routes_of_missing_features_say_so(app, path):
    error = await app.error(path, {})
    assert (error["code"], error["type"]) == (501, "NotImplementedError")
    assert PATHS[path] in error["message"]


@pytest.mark.parametrize(("method", "path"), [("POST", "/reset_prefix_cache"), ("GET", "/cache")])
async def test_development_routes_need_dev_mode_and_say_so(app, method, path):
    reply = await app.client.request(method, path)
    assert reply.status_code == 404
    assert "VLLM_SERVER_DEV_MODE=1" in reply.json()["error"]["message"]


async def test_an_unknown_route_is_just_not_found(app):
    reply = await app.client.get("/cash")
    assert (reply.status_code, reply.json()["error"]["message"]) == (404, "Not Found")


async def test_docs_can_be_turned_off(app, tmp_path):
    assert (await app.client.get("/openapi.json")).status_code == 200
    closed = App(tmp_path / "b", says("foo"), ["--disable-fastapi-docs"])
    assert (await closed.client.get("/openapi.json")).status_code == 404


# --- tokens -------------------------------------------------------------------------------------------------------


async def test_tokenize_a_prompt(app):
    ids = app.engine.tokenizer.encode("hello")
    reply = await app.post("/tokenize", {"prompt": "hello", "return_token_strs": True})
    assert reply.json() == {
        "count": len(ids),
        "max_model_len": 2048,
        "tokens": ids,
        "token_strs": ["he", "ll", "o"],
    }
    assert (await app.post("/tokenize", {"prompt": "hello"})).json()["token_strs"] is None


async def test_tokenize_shows_a_template_the_tools_that_chat_shows(tmp_path):
    app = App(tmp_path, says("foo"), ["--trust-request-chat-template"])
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"function": {"name": "f", "strict": None}}],
        "chat_template": "{{ tools | tojson }}",
    }
    tokens = (await app.post("/tokenize", body)).json()["tokens"]
    await app.post("/v1/chat/completions", {**body, "tool_choice": "none"})
    assert tokens == app.call.prompt["prompt_token_ids"]
    error = await app.error("/tokenize", {**body, "tools": [{"type": "web"}]})
    assert error["code"] == 400
    assert error["param"].startswith("tools.0")


async def test_tokenize_a_conversation_as_chat_would_see_it(app):
    await app.chat()
    reply = await app.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    assert reply.json()["tokens"] == app.call.prompt["prompt_token_ids"]


async def test_detokenize(app):
    ids = app.engine.tokenizer.encode("héllo")
    assert (await app.post("/detokenize", {"tokens": ids})).json() == {"prompt": "héllo"}
    for bad in (2000, -1):
        error = await app.error("/detokenize", {"tokens": [bad]})
        assert (error["code"], error["param"]) == (400, "tokens")


async def test_token_refusals(app, tmp_path):
    assert (await app.error("/tokenize", {}))["param"] == "prompt"
    assert (await app.error("/tokenize", {"prompt": "a", "model": "x"}))["code"] == 404
    bare = App(tmp_path / "b", says("foo"), ["--skip-tokenizer-init"])
    assert (await bare.error("/tokenize", {"prompt": "a"}))["code"] == 400


# --- token ids in and out -----------------------------------------------------------------------------------------


async def test_generate_from_token_ids(app):
    body = {
        "token_ids": [5, 6],
        "sampling_params": {"temperature": 0.5, "max_tokens": 3, "logprobs": 1, "prompt_logprobs": 0},
        "priority": 2,
    }
    reply = (await app.post("/inference/v1/generate", body)).json()
    assert reply["choices"][0]["token_ids"] == [100]
    assert reply["choices"][0]["logprobs"][0]["100"] == {"logprob": -0.25, "rank": 1}
    assert (app.call.params.temperature, app.call.params.detokenize, app.call.options["priority"]) == (
        0.5,
        False,
        2,
    )
    assert reply["prompt_logprobs"][0] is None
    chunks = await app.stream("/inference/v1/generate", token_ids=[5], stream_options={"include_usage": True})
    assert chunks[0]["choices"][0] == {**chunks[0]["choices"][0], "token_ids": [100], "finish_reason": "stop"}
    assert chunks[-1]["usage"]["completion_tokens"] == 1


async def test_generate_honours_what_stands_beside_the_sampling_params(app):
    body = {
        "token_ids": [5],
        "sampling_params": {"extra_args": {"own": 1}, "logit_bias": {"5": 1.5}},
        "kv_transfer_params": {"a": 1},
        "kv_retention": {"pin": True},
        "vllm_xargs": {"other": 2},
        "temperature": None,
        "user": "u",
    }
    reply = await app.post("/inference/v1/generate", body)
    assert reply.status_code == 200, reply.text
    params = app.call.params
    assert params.logit_bias == {5: 1.5}
    assert (params.extra_args["own"], params.extra_args["other"]) == (1, 2)
    assert params.extra_args["kv_transfer_params"] == {"a": 1}
    assert params.extra_args["kv_retention"] == body["kv_retention"]


async def test_generate_streams_usage_and_prompt_logprobs(app):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await app.stream(
        "/inference/v1/generate",
        token_ids=[5, 6],
        stream_options=options,
        sampling_params={"prompt_logprobs": 0},
    )
    assert [chunk["usage"]["prompt_tokens"] for chunk in chunks] == [2, 2]
    assert len(chunks[0]["prompt_logprobs"]) == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": [5], "sampling_params": {"stop": "x"}}, "sampling_params.stop"),
        ({"token_ids": [5], "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"token_ids": [5], "sampling_params": {"n": 0}}, "n"),
        ({"token_ids": "x"}, "token_ids"),
        ({"token_ids": [5], "temperature": 0.5}, "temperature"),
        ({"token_ids": [5], "n": 2}, "n"),
        ({"token_ids": [5], "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"token_ids": [5], "response_format": {"type": "json_object"}}, "response_format"),
        ({"token_ids": [5], "features": {"image": 1}}, "features"),
        ({"token_ids": [5], "sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias"),
        ({"token_ids": [5], "sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
    ],
)
async def test_generate_refusals(app, body, param):
    error = await app.error("/inference/v1/generate", body)
    assert (error["code"], error["param"]) == (400, param)


async def test_abort_by_id(app):
    reply = await app.post("/inference/v1/abort_requests", {"request_ids": ["a", "b"]})
    assert reply.json() == {"status": "aborted", "aborted": 2}
    assert app.engine.control == [("abort", ["a", "b"])]


# --- keys, headers, sizes -----------------------------------------------------------------------------------------


@pytest.fixture
def locked(tmp_path):
    return App(tmp_path, says("foo"), ["--api-key", "k1", "k2"])


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/tokenize", "/inference/v1/generate", "/pooling", "/load", "/nowhere", "/docs"],
)
async def test_every_path_but_the_open_ones_needs_a_key(locked, path):
    error = await locked.error(path, {"prompt": "a"})
    assert (error["code"], error["type"]) == (401, "AuthenticationError")
    for header in ("Bearer wrong", "Basic k1", "Bearer", "k1", "Bearer k1 k2"):
        assert (await locked.error(path, {}, headers={"Authorization": header}))["code"] == 401


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/metrics"])
async def test_open_paths_need_no_key(locked, path):
    assert (await locked.client.get(path)).status_code == 200


async def test_any_of_the_keys_opens(locked):
    for key in ("k1", "k2"):
        reply = await locked.post(
            "/v1/completions", {"prompt": "a"}, headers={"Authorization": f"Bearer {key}"}
        )
        assert reply.status_code == 200
    assert (await locked.client.options("/v1/completions")).status_code != 401


async def test_the_key_may_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "env")
    app = App(tmp_path, says("foo"))
    assert (await app.error("/v1/completions", {"prompt": "a"}))["code"] == 401
    reply = await app.post("/v1/completions", {"prompt": "a"}, headers={"Authorization": "Bearer env"})
    assert reply.status_code == 200


async def test_request_ids_are_sent_back_on_request(app, tmp_path):
    assert "x-request-id" not in (await app.client.get("/version")).headers
    echoing = App(tmp_path / "b", says("foo"), ["--enable-request-id-headers"])
    assert (await echoing.client.get("/version", headers={"X-Request-Id": "abc"})).headers[
        "x-request-id"
    ] == "abc"
    assert len((await echoing.client.get("/version")).headers["x-request-id"]) == 32


async def test_too_large_bodies_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_HTTP_MAX_REQUEST_BODY_SIZE", "1000")
    app = App(tmp_path, says("foo"))
    error = await app.error("/v1/completions", {"prompt": "a" * 2000})
    assert (error["code"], error["type"]) == (413, "PayloadTooLargeError")

    async def pieces():
        for _ in range(3):
            yield b"a" * 500

    reply = await app.client.post(
        "/v1/completions", content=pieces(), headers={"content-type": "application/json"}
    )
    assert reply.status_code == 413
    await app.complete()


async def test_too_many_headers_are_refused(tmp_path):
    app = App(tmp_path, says("foo"), ["--h11-max-header-count", "20"])
    reply = await app.client.get("/version", headers={f"x-{n}": "v" for n in range(30)})
    assert reply.status_code == 431


async def test_cross_origin_requests(tmp_path):
    app = App(tmp_path, says("foo"), ["--allowed-origins", '["http://a"]'])
    reply = await app.client.get("/version", headers={"Origin": "http://a"})
    assert reply.headers["access-control-allow-origin"] == "http://a"
    assert (
        "access-control-allow-origin"
        not in (await app.client.get("/version", headers={"Origin": "http://b"})).headers
    )


async def test_middleware_by_import_path(tmp_path):
    app = App(
        tmp_path,
        says("foo"),
        [
            "--middleware",
            "tests.unit.entrypoints.custom_middleware.Stamp",
            "--middleware",
            "tests.unit.entrypoints.custom_middleware.stamp",
        ],
    )
    headers = (await app.client.get("/version")).headers
    assert (headers["x-class"], headers["x-function"]) == ("yes", "yes")


@pytest.mark.parametrize("path", ["no.such.module", "os.sep", "nodots"])
async def test_bad_middleware_is_refused(tmp_path, path):
    with pytest.raises(ValueError, match="--middleware"):
        App(tmp_path, says("foo"), ["--middleware", path])


# --- errors -------------------------------------------------------------------------------------------------------


async def test_a_body_that_is_no_json(app):
    reply = await app.client.post(
        "/v1/completions", content=b"{", headers={"content-type": "application/json"}
    )
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert "not valid JSON" in error["message"]


async def test_unknown_paths_and_methods_have_error_objects(app):
    assert (await app.error("/nowhere", {}))["type"] == "NotFoundError"
    reply = await app.client.get("/v1/completions")
    assert (reply.status_code, reply.json()["error"]["type"]) == (405, "MethodNotAllowedError")


def test_at_most_ten_violations_are_listed():
    errors = [{"loc": ("body", f"f{n}"), "msg": "bad", "input": n, "type": "x"} for n in range(13)]
    text = describe_validation(errors)
    assert "f9: bad (got 9)" in text
    assert "f10" not in text
    assert text.endswith("and 3 more")


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("<object at 0x7f00deadbeef> broke", "<object> broke"),
        ("cannot open /root/models/x/config.json", "cannot open <path>"),
        ("POST /v1/completions failed", "POST /v1/completions failed"),
        ("a/b and http://h/p/q stay", "a/b and http://h/p/q stay"),
    ],
)
def test_messages_tell_nothing_about_the_machine(raw, clean):
    assert clean_message(raw) == clean


def test_public_error_facades():
    body = public_create("gone", status_code=404, param="model")
    assert isinstance(body, ErrorResponse)
    assert body.model_dump() == {
        "error": {"message": "gone", "type": "NotFoundError", "param": "model", "code": 404}
    }
    assert create_error_response("x", err_type="Mine").error.type == "Mine"
    assert create_error_response("x", status_code=418).error.type == "BadRequestError"
    assert create_error_response("x", status_code=507).error.type == "InternalServerError"
    assert callable(validation_exception_handler)
