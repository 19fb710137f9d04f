"""`/kv_cache/lookup`, `/kv_cache/stats`, the page `/cache`, and cached tokens by tier in usage: the HTTP layer alone."""

import re

import pytest

from tests.helpers.http_app import App, says
from vllm.entrypoints.openai.kv_cache.serving import join_reports
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

FOUND = {
    "prompt_tokens": 8,
    "cached_tokens": 6,
    "cached_tokens_by_source": {"device": 4, "host": 2},
    "tokens_by_tier": {"device": 4, "host": 6},
    "complete": True,
}
LESS = {**FOUND, "cached_tokens": 0, "cached_tokens_by_source": {"device": 0, "host": 0}}
DETAILS = ["--enable-prompt-tokens-details"]
ALWAYS = {"include_usage": True, "continuous_usage_stats": True}


def pool(tier, **changes):
    counts = dict.fromkeys(("blocks_cached", "entries_cached", "blocks_evicted", "block_bytes"), 1)
    return {
        "tier": tier,
        "medium": "GPU",
        "blocks_total": 10,
        "blocks_free": 7,
        "blocks_held": 3,
        **counts,
        **changes,
    }


def transfer(direction, done):
    counts = dict.fromkeys(("blocks_in_flight", "blocks_failed", "blocks_dropped"), 0)
    counts |= {"blocks_scheduled": done, "blocks_done": done, "bytes_done": 16 * done}
    return {"tier": "host", "direction": direction, **counts}


def report(asked=40, hit=10):
    group = {
        "group": 0,
        "kind": "full_attention",
        "spec": "FullAttentionSpec",
        "block_size": 16,
        "use": "cache",
    }
    return {
        "pools": [pool("device"), pool("host", medium="CPU")],
        "groups": [{**group, "sliding_window": None, "num_layers": 2, "block_bytes": 64}],
        "hits": [
            {"tier": "device", "tokens_asked": asked, "tokens_hit": hit, "tokens_reported": 7},
            {"tier": "host", "tokens_asked": 0, "tokens_hit": 0, "tokens_reported": 0},
        ],
        "transfers": [transfer("store", 5), transfer("load", 2)],
        "modes": {"host": "eager"},
        "pending_store_blocks": 1,
        "requests": {"running": 1, "waiting": 2, "loading": 0, "admitted": 3},
        "block_size": 16,
        "prefix_caching": True,
    }


@pytest.fixture
def app(tmp_path):
    made = App(tmp_path, says("foo"))
    made.engine.answers["lookup_kv_cache"] = [FOUND]
    made.engine.answers["get_kv_cache_reports"] = [report()]
    return made


async def ok(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()


def asked(app):
    """Token ids of the last look-up."""
    name, prompt = app.engine.control[-1]
    assert name == "lookup_kv_cache"
    return prompt["prompt_token_ids"]


# --- look-ups -----------------------------------------------------------------------------------------------------


async def test_a_look_up_answers_by_tier(app):
    body = await ok(await app.post("/kv_cache/lookup", {"model": "m", "token_ids": [5, 6, 7]}))
    assert body["model"] == "m"
    assert body["prompt_tokens"] == 3
    assert body["cached_tokens"] == sum(body["cached_tokens_by_source"].values()) == 6
    assert body["tokens_by_tier"] == {"device": 4, "host": 6}
    assert body["complete"] is True
    assert [engine["engine"] for engine in body["engines"]] == [0]
    assert asked(app) == [5, 6, 7]
    assert app.engine.calls == []


async def test_prompts_are_rendered_as_the_generating_endpoints_render_them(app):
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
    }
    for path, bodies in (
        ("/v1/completions", [{"prompt": "hello"}, {"prompt": [9, 8]}, {"prompt": "hello", "truncate_prompt_tokens": 2}]),
        ("/v1/chat/completions", [{"messages": chat["messages"]}, {**chat, "add_generation_prompt": False}, chat]),
    ):  # fmt: skip
        for body in bodies:
            await ok(await app.post(path, body))
            sent = app.call.prompt["prompt_token_ids"]
            await ok(await app.post("/kv_cache/lookup", {**body, "max_tokens": 3, "stream": True}))
            assert asked(app) == sent


async def test_a_text_can_be_asked_for_in_the_query(app):
    await ok(await app.client.get("/kv_cache/lookup", params={"prompt": "hello", "model": "other"}))
    in_query = asked(app)
    await ok(await app.post("/kv_cache/lookup", {"prompt": "hello"}))
    assert asked(app) == in_query
    assert (await app.client.get("/kv_cache/lookup")).status_code == 400
    assert (await app.client.get("/kv_cache/lookup?prompt=x&model=nope")).status_code == 404
    assert (await app.client.get("/kv_cache/lookup?prompt=x&cache_salt=")).status_code == 400


async def test_salt_and_adapter_reach_the_engine(app, monkeypatch):
    seen = {}

    async def lookup(prompt, *, cache_salt, lora_request):
        seen.update(cache_salt=cache_salt, lora_request=lora_request)
        return [FOUND]

    monkeypatch.setattr(app.engine, "lookup_kv_cache", lookup, raising=False)
    await ok(await app.post("/kv_cache/lookup", {"prompt": "x", "cache_salt": "s", "lora": "a"}))
    assert seen == {"cache_salt": "s", "lora_request": LoRARequest("a", 1)}
    adapter = {"lora_name": "a", "lora_int_id": 3, "lora_path": "/p"}
    await ok(await app.post("/kv_cache/lookup", {"prompt": "x", "lora": adapter}))
    assert seen == {"cache_salt": None, "lora_request": LoRARequest("a", 3, "/p")}
    error = await app.error("/kv_cache/lookup", {"prompt": "x", "lora": {"lora_name": "a", "lora_int_id": 0}})
    assert (error["code"], error["param"]) == (400, "lora")


async def test_the_engine_that_has_most_is_named_first(app):
    app.engine.answers["lookup_kv_cache"] = [LESS, FOUND, None]
    body = await ok(await app.post("/kv_cache/lookup", {"prompt": "x"}))
    assert (body["engine"], body["cached_tokens"]) == (1, 6)
    assert [engine["cached_tokens"] for engine in body["engines"]] == [0, 6]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "x", "token_ids": [1]}, 400, "token_ids"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
        ({"prompt": "x", "cache_salt": ""}, 400, "cache_salt"),
        ({"prompt": "x", "model": "nope"}, 404, "model"),
        ({"messages": [], "model": "m"}, 400, "messages"),
        ({"token_ids": "x"}, 400, "token_ids"),
    ],
)
async def test_bad_look_ups_are_refused_by_name(app, body, code, param):
    error = await app.error("/kv_cache/lookup", body)
    assert error["code"] == code, error
    assert param in (error["param"] or "") + error["message"], error
    assert app.engine.control == []


async def test_unknown_query_parameters_are_refused(app):
    for method, path, told in (
        (
            "GET",
            "/kv_cache/lookup?prompt=ab&salt=x",
            "'salt'; this call takes cache_salt, model, prompt",
        ),
        ("POST", "/kv_cache/lookup?prompt=ab", "'prompt'; this call takes none"),
        ("GET", "/kv_cache/stats?tier=host", "'tier'; this call takes none"),
    ):
        reply = await app.client.request(method, path, json={"prompt": [5, 6]})
        assert reply.status_code == 400
        assert reply.json()["error"]["message"].startswith(f"unknown query parameter {told}")
    assert app.engine.control == []


async def test_a_text_given_twice_is_refused(app):
    reply = await app.client.get("/kv_cache/lookup?prompt=ab&prompt=cd")
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("query parameter 'prompt' is given more than once")


@pytest.mark.parametrize(
    ("body", "parameter", "message", "param"),
    [
        ({"token_ids": [5]}, "prompt", "Token id 5 is odd", "token_ids"),
        ({"prompt": "x"}, "prompt", "Token id 5 is odd", "prompt"),
        ({"prompt": "x", "lora": "a"}, "lora_request", "lora_request needs more", "lora"),
    ],
)
async def test_what_the_engine_refuses_is_told_by_the_names_of_the_body(
    app, monkeypatch, body, parameter, message, param
):
    async def refuse(*args, **kwargs):
        raise VLLMValidationError(message, parameter=parameter, value="a")

    monkeypatch.setattr(app.engine, "lookup_kv_cache", refuse)
    error = await app.error("/kv_cache/lookup", body)
    assert error["code"] == 400
    assert error["param"] == param
    assert error["message"].startswith(message.replace("lora_request", "lora"))


async def test_engines_that_cannot_tell_or_are_gone(app):
    app.engine.answers["lookup_kv_cache"] = [None]
    app.engine.answers["get_kv_cache_reports"] = [None]
    assert (await app.error("/kv_cache/lookup", {"prompt": "x"}))["code"] == 501
    assert (await app.client.get("/kv_cache/stats")).status_code == 501
    app.engine.answers["get_kv_cache_reports"] = EngineDeadError()
    assert (await app.client.get("/kv_cache/stats")).status_code == 500
    app.engine.dead = True
    assert (await app.error("/kv_cache/lookup", {"prompt": "x"}))["code"] == 500


async def test_keys_guard_the_cache(tmp_path):
    app = App(tmp_path, says("foo"), ["--api-key", "k"])
    app.engine.answers["get_kv_cache_reports"] = [report()]
    assert (await app.client.get("/kv_cache/stats")).status_code == 401
    assert (await app.post("/kv_cache/lookup", {"prompt": "x"})).status_code == 401
    await ok(await app.client.get("/kv_cache/stats", headers={"Authorization": "Bearer k"}))


# --- statistics ---------------------------------------------------------------------------------------------------


async def test_statistics_of_one_engine(app):
    body = await ok(await app.client.get("/kv_cache/stats"))
    assert (body["engines"], body["block_size"], body["pending_store_blocks"]) == (1, 16, 1)
    assert body["tiers"] == [
        {
            "tier": "device",
            "mode": None,
            "tokens_asked": 40,
            "tokens_hit": 10,
            "tokens_reported": 7,
            "hit_rate": 0.25,
        },
        {
            "tier": "host",
            "mode": "eager",
            "tokens_asked": 0,
            "tokens_hit": 0,
            "tokens_reported": 0,
            "hit_rate": None,
        },
    ]
    assert [(p["engine"], p["tier"]) for p in body["pools"]] == [(0, "device"), (0, "host")]
    assert body["groups"][0]["use"] == "cache"
    assert body["requests"] == {"running": 1, "waiting": 2, "loading": 0, "admitted": 3}


def test_statistics_of_several_engines_are_added_up():
    joined = join_reports([report(40, 10), report(60, 40)])
    assert joined.engines == 2
    assert [(p.engine, p.tier) for p in joined.pools] == [
        (0, "device"),
        (0, "host"),
        (1, "device"),
        (1, "host"),
    ]
    assert not any(pool.shared for pool in joined.pools)
    views = join_reports([report(40, 10), report(60, 40)], ["host"]).pools
    assert [pool.shared for pool in views] == [False, True, False, True]
    device = joined.tiers[0]
    assert (device.tokens_asked, device.tokens_hit, device.hit_rate) == (100, 50, 0.5)
    assert device.tokens_reported == 14
    assert [(t.direction, t.blocks_done, t.bytes_done) for t in joined.transfers] == [
        ("store", 10, 160),
        ("load", 4, 64),
    ]
    assert (joined.pending_store_blocks, joined.requests.admitted, len(joined.groups)) == (2, 6, 1)


# --- the page -----------------------------------------------------------------------------------------------------


async def test_the_page_is_one_file_that_loads_nothing_and_is_served_in_development_only(
    tmp_path, monkeypatch
):
    assert (await App(tmp_path, says("foo")).client.get("/cache")).status_code == 404
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    reply = await App(tmp_path, says("foo")).client.get("/cache")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    links = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)|url\(([^)]*)""", reply.text)
    assert links == [("data:,", "")]
    outside = set(re.findall(r"https?://[^\s\"']*", reply.text))
    assert outside == {"http://www.w3.org/2000/svg"}, (
        "the name space of SVG is a name, nothing is fetched from it"
    )
    assert "innerHTML" not in reply.text


# --- usage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "chunks"), [("/v1/completions", 3), ("/v1/chat/completions", 4)])
async def test_met_08_tiers_are_in_every_usage_object_and_add_up(tmp_path, path, chunks):
    app = App(tmp_path, says("a", "b"), DETAILS, cached_tokens=5)
    seen = [
        chunk["usage"]["prompt_tokens_details"] for chunk in await app.stream(path, stream_options=ALWAYS)
    ]
    assert len(seen) == chunks
    for details in seen:
        assert details["cached_tokens"] == 5
        assert details["cached_tokens_by_source"] == {"device": 4, "host": 1}
    whole = await (app.chat if "chat" in path else app.complete)()
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens_by_source"] == {"device": 4, "host": 1}


async def test_tiers_of_several_prompts_are_added_up(tmp_path):
    app = App(tmp_path, says("a"), DETAILS, cached_tokens=3)
    details = (await app.complete(prompt=["aaa", "bbb"]))["usage"]["prompt_tokens_details"]
    assert (details["cached_tokens"], details["cached_tokens_by_source"]) == (6, {"device": 4, "host": 2})
    chunks = await app.stream("/v1/completions", prompt=["aaa", "bbb"], stream_options=ALWAYS)
    last = chunks[-1]["usage"]["prompt_tokens_details"]
    assert (last["cached_tokens"], last["cached_tokens_by_source"]) == (6, {"device": 4, "host": 2})


async def test_tiers_of_several_conversations_are_added_up(tmp_path):
    app = App(tmp_path, says("a"), DETAILS, cached_tokens=3)
    turns = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    body = await ok(await app.post("/v1/chat/completions/batch", {"messages": turns}))
    details = body["usage"]["prompt_tokens_details"]
    assert (details["cached_tokens"], details["cached_tokens_by_source"]) == (6, {"device": 4, "host": 2})
    assert details["created_cache_tokens"] == 0


async def test_engines_that_know_no_tiers_report_none(tmp_path):
    app = App(tmp_path, says("a"), DETAILS, cached_tokens=None)
    details = (await app.complete())["usage"]["prompt_tokens_details"]
    assert (details["cached_tokens"], details["cached_tokens_by_source"]) == (0, None)
