"""Control and sight of the cache on a real server: look-ups, statistics, resets, and the live page in a real browser."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.offload_roundtrip import block_size, full_blocks_below_last, random_prompt
from examples.serving import Server, serve
from tests.e2e_cpu.conftest import EventedServer
from tests.helpers.browser import Browser, find_browser

TEXT = "The cache remembers what was said before. " * 12


@pytest.fixture(scope="module")
def browser() -> Browser:
    return find_browser()


@pytest.fixture(scope="module")
def server(glm_server: EventedServer) -> Server:
    return glm_server.server


def ask(server: Server, **body: Any) -> dict[str, Any]:
    reply = server.request("POST", "/kv_cache/lookup", body)
    assert reply.status == 200, reply.body
    return dict(reply.body)


def stats(server: Server) -> dict[str, Any]:
    reply = server.request("GET", "/kv_cache/stats")
    assert reply.status == 200, reply.body
    return dict(reply.body)


def details(server: Server, prompt: list[int]) -> dict[str, Any]:
    reply = server.request("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1})
    return dict(reply.body["usage"]["prompt_tokens_details"])


def tiers(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {tier["tier"]: tier for tier in told["tiers"]}


def quiet(server: Server) -> dict[str, Any]:
    """The statistics once they no longer change and every metric of the last step is out."""
    server.wait_for_stores()
    before = stats(server)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        time.sleep(0.2)
        after = stats(server)
        if after == before:
            return after
        before = after
    raise AssertionError("the statistics do not come to rest")


def test_look_ups_follow_a_prompt_through_the_tiers_and_agree_with_usage(server: Server) -> None:
    block = block_size(server)
    prompt = random_prompt(3 * block + 5, seed=41)
    full = full_blocks_below_last(len(prompt), block)
    assert ask(server, token_ids=prompt)["cached_tokens"] == 0
    server.complete(prompt, 2)
    server.wait_for_stores()
    found = ask(server, token_ids=prompt)
    assert found["cached_tokens_by_source"] == {"device": full, "host": 0}
    assert found["tokens_by_tier"] == {"device": full, "host": full}

    report = server.request("POST", "/reset_prefix_cache").body
    assert report["success"], report
    told = tiers(report)
    assert (told["device"]["asked"], told["device"]["blocks_cached"]) == (True, 0)
    assert told["device"]["blocks_dropped"] > 0
    assert (told["host"]["asked"], told["host"]["success"]) == (False, None)
    assert told["host"]["blocks_cached"] > 0
    found = ask(server, token_ids=prompt)
    assert found["cached_tokens_by_source"] == {"device": 0, "host": full}
    usage = details(server, prompt)
    assert usage["cached_tokens_by_source"] == found["cached_tokens_by_source"]
    assert usage["cached_tokens"] == found["cached_tokens"] == full

    assert server.reset(external=True)
    assert ask(server, prompt=prompt)["tokens_by_tier"] == {"device": 0, "host": 0}
    assert details(server, prompt)["cached_tokens"] == 0


def test_a_tier_that_is_emptied_alone_leaves_the_other(server: Server) -> None:
    block = block_size(server)
    prompt = random_prompt(3 * block + 5, seed=43)
    full = full_blocks_below_last(len(prompt), block)
    server.complete(prompt, 2)
    server.wait_for_stores()
    report = server.request("POST", "/reset_prefix_cache?tiers=host").body
    assert report["success"], report
    told = tiers(report)
    assert told["host"]["blocks_dropped"] > 0
    assert (told["host"]["blocks_cached"], told["device"]["asked"]) == (0, False)
    assert ask(server, token_ids=prompt)["tokens_by_tier"] == {"device": full, "host": 0}
    refused = server.request("POST", "/reset_prefix_cache?tiers=host&tiers=disk")
    assert refused.status == 400
    assert refused.body["error"]["message"] == "tiers names 'disk'; this engine has device, host"
    assert ask(server, token_ids=prompt)["tokens_by_tier"]["device"] == full


def test_a_conversation_is_found_where_its_completion_put_it(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
    server.request("POST", "/v1/chat/completions", body)
    reply = server.request("POST", "/v1/chat/completions", body).body
    usage = reply["usage"]
    found = ask(server, **body)
    assert found["prompt_tokens"] == usage["prompt_tokens"]
    assert found["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert ask(server, **body, cache_salt="someone else")["cached_tokens"] == 0


def test_look_ups_leave_no_trace_in_metrics_and_statistics(server: Server) -> None:
    before = quiet(server)
    metrics = [
        server.metric(name)
        for name in ("vllm:prefix_cache_queries_total", "vllm:external_prefix_cache_queries_total")
    ]
    for seed in range(20):
        ask(server, token_ids=random_prompt(200, seed=seed))
    assert stats(server) == before
    assert metrics == [
        server.metric(name)
        for name in ("vllm:prefix_cache_queries_total", "vllm:external_prefix_cache_queries_total")
    ]


def test_statistics_agree_with_metrics_and_with_what_requests_report(server: Server) -> None:
    start = quiet(server)
    cached: dict[str, int] = {"device": 0, "host": 0}
    for round_ in range(3):
        for seed in (50, 51, 50):
            usage = details(server, random_prompt(3 * block_size(server) + 5, seed=seed))
            for tier, tokens in usage["cached_tokens_by_source"].items():
                cached[tier] += tokens
        server.wait_for_stores()
        server.reset(external=round_ == 1)
    told = quiet(server)
    hits = {name: tier["tokens_hit"] - tiers(start)[name]["tokens_hit"] for name, tier in tiers(told).items()}
    assert hits == cached
    assert hits["device"] > 0
    assert hits["host"] > 0
    device, host = told["tiers"]
    for value, name in (
        (device["tokens_asked"], "vllm:prefix_cache_queries_total"),
        (device["tokens_hit"], "vllm:prefix_cache_hits_total"),
        (host["tokens_asked"], "vllm:external_prefix_cache_queries_total"),
        (host["tokens_hit"], "vllm:external_prefix_cache_hits_total"),
        (device["tokens_hit"] + host["tokens_hit"], "vllm:prompt_tokens_cached_total"),
    ):
        assert value == server.metric(name), name
    store, load = told["transfers"]
    assert load["blocks_done"] == server.metric("vllm:simple_kv_offload_load_blocks_total")
    ended = store["blocks_done"] + store["blocks_failed"] + store["blocks_dropped"]
    assert ended == store["blocks_scheduled"] == server.metric("vllm:simple_kv_offload_store_blocks_total")
    assert load["bytes_done"] == load["blocks_done"] * told["pools"][1]["block_bytes"]
    assert told["pools"][1]["entries_cached"] == server.metric("vllm:simple_kv_offload_cached_entries")


# --- the page -----------------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def value_of(told: Any, path: str) -> Any:
    for part in path.split("."):
        told = told[int(part)] if part.isdigit() else told[part]
    return told


def test_the_page_shows_the_statistics(server: Server, browser: Browser) -> None:
    server.complete(random_prompt(200, seed=1), 4)
    told = quiet(server)
    dom = browser.dom(f"{server.url}/cache?interval=500")
    assert dom.body["data-state"] == "live", dom.by_id("state")
    fields = dom.fields("field")
    assert len(fields) >= 3 * len(told["pools"]) + 2 * len(told["tiers"]) + 5 * len(told["transfers"])
    assert fields == {path: shown(value_of(told, path)) for path in fields}
    assert dom.by_id("model") == "m"
    assert dom.fields("reset") == {
        "?tiers=device": "Reset device",
        "?tiers=host": "Reset host",
        "?reset_external=true": "Reset all tiers",
    }
    assert (
        dom.by_id("groups").count("scratch") == sum(group["use"] == "scratch" for group in told["groups"]) > 0
    )
    assert dom.html.count('class="line"') == len({pool["tier"] for pool in told["pools"]})


def test_the_page_looks_a_prompt_up(server: Server, browser: Browser) -> None:
    server.request("POST", "/v1/completions", {"prompt": TEXT, "max_tokens": 1})
    found = ask(server, prompt=TEXT.strip())
    assert found["cached_tokens"] > 0
    dom = browser.dom(f"{server.url}/cache?prompt={TEXT.strip().replace(' ', '%20')}")
    shares = {"rest": found["prompt_tokens"] - found["cached_tokens"], **found["cached_tokens_by_source"]}
    assert dom.fields("found") == {tier: shown(tokens) for tier, tokens in shares.items()}


def test_the_page_draws_itself_in_light_and_dark(server: Server, browser: Browser, tmp_path: Path) -> None:
    pictures = {}
    for theme in ("light", "dark"):
        url = f"{server.url}/cache?theme={theme}"
        pictures[theme] = browser.screenshot(url, tmp_path / f"{theme}.png", (1280, 1100))
        assert pictures[theme].startswith(b"\x89PNG")
        assert len(pictures[theme]) > 20_000
    assert pictures["light"] != pictures["dark"]


def test_the_page_goes_on_asking_while_it_is_open(server: Server, browser: Browser) -> None:
    points = [
        browser.dom(f"{server.url}/cache?interval=200", budget_ms=budget).html for budget in (500, 4000)
    ]
    lines = [re.findall(r'<path class="line" d="M([^"]+)"', html) for html in points]
    short, long = (max(line.count("L") + 1 for line in of_tiers) for of_tiers in lines)
    assert long > short, (short, long)


@pytest.fixture(scope="module")
def chain_server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A host pool smaller than the prompts with a disk below it, and beside them a connector that counts no copies."""
    folder = tmp_path_factory.mktemp("tiers")
    chain = {
        "num_cpu_blocks": 33,
        "disk_tier": True,
        "disk_path": str(folder / "kv"),
        "decline_slow_tier": "off",
    }
    children = [
        {"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_extra_config": chain},
        {
            "kv_connector": "ExampleConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    ]
    config = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    config["kv_connector_extra_config"] = {
        "connectors": [child | {"kv_role": "kv_both"} for child in children]
    }
    flags = ["--kv-transfer-config", json.dumps(config), "--dtype", "float32", "--max-model-len", "512"]
    with serve(tiny_llama, *flags, "--num-gpu-blocks-override", "36") as server:
        yield server


def test_the_page_draws_a_disk_behind_the_host_pool_that_it_belongs_to(
    chain_server: Server, browser: Browser
) -> None:
    prompts = [random_prompt(10 * block_size(chain_server) + 5, seed=seed) for seed in range(8)]
    for prompt in prompts:
        chain_server.complete(prompt, 2)
        chain_server.wait_for_stores()
    found = ask(chain_server, token_ids=prompts[0])["cached_tokens_by_source"]
    assert found["disk"] > 0, found
    assert details(chain_server, prompts[0])["cached_tokens_by_source"] == found
    quiet(chain_server)
    told = stats(chain_server)
    moved = {(t["tier"], t["direction"]): t["blocks_done"] for t in told["transfers"]}
    assert moved["disk", "store"] > 0
    assert moved["disk", "load"] > 0
    dom = browser.dom(f"{chain_server.url}/cache")
    assert dom.fields("route") == {
        "host store": "device → host",
        "host load": "host → device",
        "disk store": "host → disk",
        "disk load": "disk → host",
    }
    flows = dom.fields("flow")
    assert set(flows) == {
        f"{outer} {arrow} {inner}"
        for outer, inner in (("device", "host"), ("host", "disk"), ("device", "external_unspecified"))
        for arrow in "→←"
    }
    assert flows["host → disk"].endswith("B/s")
    # What the other connector copies is not known: no figure is shown for it.
    assert flows["device ← external_unspecified"] == "← –"
