import dataclasses

import pytest

from tests.helpers.http_app import App, says
from vllm.config import KVTransferConfig
from vllm.entrypoints.openai import dev_routes
from vllm.entrypoints.openai.dev_routes import plain
from vllm.v1.engine.exceptions import EngineDeadError, UtilityRefusedError


@pytest.fixture
def app(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    return App(tmp_path, says("foo"))


async def post(app, path, body=None):
    reply = await app.client.post(path, **({} if body is None else {"json": body}))
    assert reply.status_code == 200, reply.text
    return reply.json() if reply.content else None


async def test_pfx_15_reset_reports_success_reason_and_counts(app):
    app.engine.answers["reset_prefix_cache_detailed"] = {
        "success": False,
        "reason": "2 blocks in use",
        "held_blocks": 2,
    }
    assert await post(app, "/reset_prefix_cache") == {
        "success": False,
        "reason": "2 blocks in use",
        "held_blocks": 2,
    }
    app.engine.answers["reset_prefix_cache_detailed"] = {"success": True, "reason": "", "held_blocks": 0}
    body = await post(app, "/reset_prefix_cache?reset_running_requests=true&reset_external=true")
    assert body == {"success": True, "reason": None, "held_blocks": 0}
    assert app.engine.control == [
        ("reset_prefix_cache_detailed", False, False, None),
        ("reset_prefix_cache_detailed", True, True, None),
    ]


async def test_a_reset_by_tier_names_each_of_them(app):
    app.engine.answers["reset_prefix_cache_detailed"] = {"success": True, "reason": "", "tiers": []}
    await post(app, "/reset_prefix_cache?tiers=host&tiers=disk")
    await post(app, "/reset_prefix_cache?tiers=device&reset_external=true&reset_running_requests=true")
    assert app.engine.control == [
        ("reset_prefix_cache_detailed", False, False, ["host", "disk"]),
        ("reset_prefix_cache_detailed", True, True, ["device"]),
    ]


async def test_each_of_several_engines_has_its_reason_or_null(app):
    parts = [{"success": True, "reason": ""}, {"success": False, "reason": "1 block is held"}]
    app.engine.answers["reset_prefix_cache_detailed"] = {"success": False, "reason": "some", "engines": parts}
    told = await post(app, "/reset_prefix_cache")
    assert [part["reason"] for part in told["engines"]] == [None, "1 block is held"]


async def test_a_reset_of_a_tier_that_is_not_there_is_a_bad_request_naming_it(app):
    told = "tiers names 'tape'; this engine has device, host"
    app.engine.answers["reset_prefix_cache_detailed"] = UtilityRefusedError(told)
    reply = await app.client.post("/reset_prefix_cache?tiers=tape")
    assert reply.status_code == 400
    assert reply.json()["error"] == {
        "message": told,
        "type": "BadRequestError",
        "param": "tiers",
        "code": 400,
    }


@pytest.mark.parametrize("error", [RuntimeError("store in flight"), EngineDeadError(), ValueError("odd")])
async def test_a_failing_reset_is_200_with_its_reason(app, error):
    app.engine.answers["reset_prefix_cache_detailed"] = error
    assert await post(app, "/reset_prefix_cache") == {"success": False, "reason": str(error)}


async def test_pause_and_resume(app):
    app.engine.answers["is_paused"] = True
    assert await post(app, "/pause?mode=keep&clear_cache=false") == {"status": "paused"}
    assert (await app.client.get("/is_paused")).json() == {"is_paused": True}
    assert await post(app, "/resume") == {"status": "resumed"}
    assert app.engine.control == [("pause_generation", "keep", False), ("is_paused",), ("resume_generation",)]
    await post(app, "/pause")
    assert app.engine.control[-1] == ("pause_generation", "abort", True)


async def test_sleep_and_wake_up(app):
    app.engine.answers["is_sleeping"] = False
    assert await post(app, "/sleep?level=2&mode=wait") == {"status": "sleeping", "level": 2}
    assert await post(app, "/wake_up?tags=weights&tags=kv_cache") == {
        "status": "awake",
        "tags": ["weights", "kv_cache"],
    }
    app.engine.answers["is_sleeping"] = True
    assert await post(app, "/wake_up") == {"status": "sleeping", "tags": []}
    assert (await app.client.get("/is_sleeping")).json() == {"is_sleeping": True}
    assert app.engine.control[:2] == [("sleep", 2, "wait"), ("wake_up", ["weights", "kv_cache"])]
    assert await post(app, "/release_kv_cache_memory") == {"status": "kv_cache_released"}


@pytest.mark.parametrize(
    "path",
    [
        "/sleep?level=3",
        "/sleep?level=0_1",
        "/sleep?level=+1",
        "/sleep?level=%2B1",
        "/sleep?level=1.0",
        "/sleep?level=%D9%A1",
        "/sleep?mode=nap",
        "/wake_up?tags=nobody",
        "/pause?mode=x",
        "/reset_prefix_cache?reset_external=maybe",
    ],
)
async def test_bad_query_values_are_400(app, path):
    assert (await app.error(path, None))["code"] == 400


@pytest.mark.parametrize("path", sorted({route.path for route in dev_routes.router.routes}))
async def test_unknown_query_parameters_are_400_and_nothing_is_done(app, path):
    (method,) = next(route.methods for route in dev_routes.router.routes if route.path == path)
    body = {"json": {"request_ids": ["a"], "method": "m"}} if method == "POST" else {}
    reply = await app.client.request(method, path, params={"tier": "host", "tiers[]": "host"}, **body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["message"].startswith("unknown query parameter 'tier', 'tiers[]'; this call takes ")
    assert error["param"] == "tier"
    assert app.engine.control == []


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (
            "/reset_prefix_cache?tiers=host&reset_externals=true",
            "unknown query parameter 'reset_externals'; this call takes reset_external, reset_running_requests, tiers",
        ),
        ("/resume?mode", "unknown query parameter 'mode'; this call takes none"),
    ],
)
async def test_an_unknown_query_parameter_is_told_those_that_there_are(app, path, told):
    reply = await app.client.post(path)
    assert reply.json()["error"]["message"].startswith(told)


@pytest.mark.parametrize(
    ("path", "body", "told", "param"),
    [
        (
            "/reset_prefix_cache",
            {"tiers": ["host"]},
            "this call takes no body; its query parameters: reset_ext",
            None,
        ),
        ("/sleep", {"level": 2}, "this call takes no body; its query parameters: level, mode", None),
        ("/resume", [1], "this call takes no body; its query parameters: none", None),
        ("/sleep?level=1&level=2", None, "query parameter 'level' is given more than once", "level"),
        ("/pause?mode=wait&mode=wait", None, "query parameter 'mode' is given more than once", "mode"),
    ],
)
async def test_what_a_call_would_not_look_at_is_400_and_nothing_is_done(app, path, body, told, param):
    error = await app.error(path, body)
    assert error["code"] == 400
    assert error["message"].startswith(told)
    assert error["param"] == param
    assert app.engine.control == []


async def test_bodies_that_say_nothing_and_repeated_lists_are_taken(app):
    for body in ({}, None):
        assert (await app.client.post("/resume", json=body)).status_code == 200
    reply = await app.client.post("/wake_up?tags=weights&tags=kv_cache", content=" {} ")
    assert reply.status_code == 200


async def test_other_caches(app):
    assert await post(app, "/reset_mm_cache") is None
    assert await post(app, "/reset_encoder_cache") is None


async def test_aborts(app):
    assert await post(app, "/abort_requests", {"request_ids": ["cmpl-1"]}) == {
        "status": "aborted",
        "aborted": 1,
    }
    assert app.engine.control == [("abort", ["cmpl-1"])]
    assert (await app.error("/abort_requests", {}))["param"] == "request_ids"


async def test_collective_rpc(app):
    app.engine.answers["collective_rpc"] = [1, object]
    body = await post(app, "/collective_rpc", {"method": "f", "args": [1], "kwargs": {"a": 2}, "timeout": 3})
    assert body == {"results": [1, "<class 'object'>"]}
    assert app.engine.control == [("collective_rpc", "f", 3.0, (1,), {"a": 2})]
    assert (await app.error("/collective_rpc", {}))["param"] == "method"


@pytest.mark.parametrize(
    "method", ["shutdown", "load_model", "execute_model", "sleep", "execute_method", "init_worker"]
)
async def test_calls_that_are_the_engines_own_are_refused(app, method):
    error = await app.error("/collective_rpc", {"method": method})
    assert (error["code"], error["param"]) == (400, "method")
    assert app.engine.control == []


@pytest.mark.parametrize("timeout", [0, -1, 1e30])
async def test_a_time_limit_that_is_none_is_refused(app, timeout):
    error = await app.error("/collective_rpc", {"method": "check_health", "timeout": timeout})
    assert (error["code"], error["param"]) == (400, "timeout")


@pytest.mark.parametrize("path", ["/pause", "/sleep", "/resume", "/wake_up", "/collective_rpc"])
async def test_failures_of_the_engine_say_why(app, path):
    calls = {
        "/pause": "pause_generation",
        "/sleep": "sleep",
        "/resume": "resume_generation",
        "/wake_up": "wake_up",
    }
    app.engine.answers[calls.get(path, "collective_rpc")] = RuntimeError("wait is not possible here")
    body = {"method": "x"} if path == "/collective_rpc" else None
    error = await app.error(path, body)
    assert (error["code"], error["message"]) == (500, "wait is not possible here")
    app.engine.answers[calls.get(path, "collective_rpc")] = ZeroDivisionError("secret")
    assert "secret" not in (await app.error(path, body))["message"]


async def test_server_info(app, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "k3y-of-env")
    app.engine.answers["get_kv_cache_group_metadata"] = [
        {"group_idx": 0, "kind": "full_attention", "block_size": 16, "sliding_window": None}
    ]
    app.engine.vllm_config.cache_config.cache_hit_alignment_tokens = 32
    app.engine.vllm_config.model_config.hf_token = "secret"
    body = (await app.client.get("/server_info?config_format=json")).json()
    assert body["vllm_config"]["cache_config"]["cache_hit_alignment_tokens"] == 32
    assert body["vllm_config"]["cache_config"]["block_size"] == 16
    assert body["kv_cache_groups"][0]["kind"] == "full_attention"
    assert body["vllm_env"]["VLLM_SERVER_DEV_MODE"] == "1"
    text = (await app.client.get("/server_info")).text
    assert "VllmConfig(" in text
    for shown in (str(body), text):
        assert "k3y-of-env" not in shown
        assert "secret" not in shown


def test_plain_values():
    assert plain([float("nan"), float("-inf"), 0.5]) == ["nan", "-inf", 0.5]
    assert plain({"a": (1, {2}), 3: None}) == {"a": [1, [2]], "3": None}
    assert plain(KVTransferConfig(kv_connector="A", kv_role="kv_both"))["kv_connector"] == "A"
    assert plain(dataclasses) == str(dataclasses)
