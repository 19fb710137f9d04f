"""The engine's load in reply headers: who gets it, in which format, and from which figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from tests.helpers.http_app import App, says
from vllm.entrypoints.openai import load_report
from vllm.entrypoints.openai.load_report import read_load

LOAD = {"num_requests_running": 3.0, "num_requests_waiting": 12.0, "kv_cache_usage_perc": 0.125}
TEXT = (
    "TEXT named_metrics.num_requests_running=3, named_metrics.num_requests_waiting=12, "
    "named_metrics.kv_cache_usage_perc=0.125"
)


def test_counts_are_those_of_all_engines_and_shares_their_mean() -> None:
    registry = CollectorRegistry()
    assert read_load(registry) == {}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"):
        gauge = Gauge(f"vllm:{name}", "", ["model_name", "engine"], registry=registry)
        for engine, value in (("0", 0.25), ("1", 0.75)):
            gauge.labels("m", engine).set(value if name.endswith("perc") else value * 4)
    assert read_load(registry) == {
        "num_requests_running": 4.0, "num_requests_waiting": 4.0, "kv_cache_usage_perc": 0.5
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "is_json"), [("text", False), ("TEXT", False), ("json", True), (" Json", True)]
)
async def test_a_reply_says_the_load_in_the_format_asked_for(
    asked: str, is_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_report, "read_load", lambda: LOAD)
    app = App(tmp_path, says("foo"))
    for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}, {"prompt": "x", "temperature": -1}):
        reply = await app.post("/v1/completions", body, headers={"endpoint-load-metrics-format": asked})
        told = reply.headers["endpoint-load-metrics"]
        if is_json:
            assert told.startswith("JSON {")
            assert json.loads(told.removeprefix("JSON ")) == {"named_metrics": LOAD}
        else:
            assert told == TEXT


@pytest.mark.parametrize("headers", [{}, {"endpoint-load-metrics-format": "bin"}])
async def test_nobody_else_is_told(
    headers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_report, "read_load", lambda: LOAD)
    app = App(tmp_path, says("foo"))
    reply = await app.post("/v1/completions", {"prompt": "x"}, headers=headers)
    assert reply.status_code == 200
    assert "endpoint-load-metrics" not in reply.headers


async def test_without_a_key_the_load_is_not_told_and_without_statistics_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App(tmp_path, says("foo"), ["--api-key", "k"])
    asked = {"endpoint-load-metrics-format": "text"}
    monkeypatch.setattr(load_report, "read_load", lambda: LOAD)
    refused = await app.post("/v1/completions", {"prompt": "x"}, headers=asked)
    assert (refused.status_code, "endpoint-load-metrics" in refused.headers) == (401, False)
    known = {**asked, "Authorization": "Bearer k"}
    assert (await app.post("/v1/completions", {"prompt": "x"}, headers=known)).headers[
        "endpoint-load-metrics"
    ]
    monkeypatch.setattr(load_report, "read_load", dict)
    reply = await app.post("/v1/completions", {"prompt": "x"}, headers=known)
    assert (reply.status_code, "endpoint-load-metrics" in reply.headers) == (200, False)
