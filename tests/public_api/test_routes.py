"""Routes of the server, and the names on its metrics page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.helpers.fake_engine import text_steps
from tests.helpers.http_app import App
from tests.public_api.by_hand import vllm_config
from vllm.config import KVTransferConfig, LoRAConfig, SpeculativeConfig, VllmConfig
from vllm.entrypoints.openai.unsupported_routes import PATHS
from vllm.v1.metrics.prometheus import PrometheusMetrics

SERVED = {
    "/health": "GET",
    "/ping": "GET POST",
    "/version": "GET",
    "/load": "GET",
    "/metrics": "GET",
    "/kv_event_sources": "GET",
    "/v1/models": "GET",
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/v1/chat/completions/batch": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/inference/v1/generate": "POST",
    "/inference/v1/abort_requests": "POST",
}
# Known to the interface, but without a feature behind them: they answer 501 with a reason.
REFUSED = [
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/completions/derender",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/invocations",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/start_profile",
    "/stop_profile",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
]
DEVELOPMENT = {
    "/reset_prefix_cache": "POST",
    "/reset_mm_cache": "POST",
    "/reset_encoder_cache": "POST",
    "/sleep": "POST",
    "/wake_up": "POST",
    "/is_sleeping": "GET",
    "/release_kv_cache_memory": "POST",
    "/collective_rpc": "POST",
    "/server_info": "GET",
    "/pause": "POST",
    "/resume": "POST",
    "/is_paused": "GET",
    "/abort_requests": "POST",
}


def routes_of(app: App) -> dict[str, set[str]]:
    """Path → methods, as the server's own description lists them."""
    return {
        path: {method.upper() for method in methods} for path, methods in app.app.openapi()["paths"].items()
    }


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, App]:
    """Servers: as they are, with every optional route, and in development mode."""

    def make(name: str, *flags: str) -> App:
        folder: Path = tmp_path_factory.mktemp(name)
        return App(folder, lambda call, sample: text_steps(["a"]), flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
        plain = make("plain")
        optional = make("optional", "--enable-tokenizer-info-endpoint")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        return {"plain": plain, "optional": optional, "dev": make("dev")}


@pytest.mark.parametrize(("path", "methods"), SERVED.items())
def test_routes_that_are_always_there(apps: dict[str, App], path: str, methods: str) -> None:
    assert set(methods.split(" ")) <= routes_of(apps["plain"]).get(path, set())


@pytest.mark.parametrize(("path", "method"), DEVELOPMENT.items())
def test_routes_of_the_development_mode(apps: dict[str, App], path: str, method: str) -> None:
    assert method in routes_of(apps["dev"]).get(path, set())
    assert path not in routes_of(apps["plain"])


def test_routes_by_flag(apps: dict[str, App]) -> None:
    assert "/tokenizer_info" in routes_of(apps["optional"])
    assert "/tokenizer_info" not in routes_of(apps["plain"])


async def test_routes_without_a_feature(apps: dict[str, App]) -> None:
    assert [path for path in REFUSED if path not in PATHS] == []
    for path in ("/v1/embeddings", "/v1/responses", "/invocations"):
        reply = await apps["plain"].post(path, {})
        assert reply.status_code == 501
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert (await apps["plain"].client.get("/v1/responses/some-id")).status_code == 501


async def test_shapes_of_the_small_routes(apps: dict[str, App]) -> None:
    client = apps["plain"].client
    assert (await client.get("/health")).content == b""
    assert (await client.get("/version")).json() == {"version": "0.33.0"}
    models = (await client.get("/v1/models")).json()
    assert models["object"] == "list"
    assert [card["id"] for card in models["data"]] == ["m", "other"]
    assert {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"} <= set(
        models["data"][0]
    )
    assert models["data"][0]["owned_by"] == "vllm"


GAUGES = "num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc engine_sleep_state"
COUNTERS = (
    "prefix_cache_queries prefix_cache_hits external_prefix_cache_queries external_prefix_cache_hits prompt_tokens "
    "prompt_tokens_by_source prompt_tokens_cached prompt_tokens_cached_by_source generation_tokens num_preemptions "
    "request_success admission_rejections"
)
HISTOGRAMS = (
    "request_prompt_tokens request_generation_tokens request_max_num_generation_tokens request_params_n "
    "request_params_max_tokens iteration_tokens_total request_prefill_kv_computed_tokens request_num_preemptions "
    "time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds "
    "e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds "
    "request_decode_time_seconds"
)
LABELS = {
    "num_requests_waiting_by_reason": ("reason", {"capacity", "deferred"}),
    "engine_sleep_state": ("sleep_state", {"awake", "weights_offloaded", "discard_all"}),
    "prompt_tokens_by_source": ("source", {"local_compute", "local_cache_hit", "external_kv_transfer"}),
    "prompt_tokens_cached_by_source": ("source", {"device", "host", "p2p", "disk", "external_unspecified"}),
    "request_success": ("finished_reason", {"stop", "length", "abort", "error", "repetition"}),
    "admission_rejections": ("reason", {"max_num_queued_reqs", "max_num_queued_tokens"}),
    "num_requests_kv_fetch_by_stage": ("stage", {"waiting_to_start", "in_progress", "completed_waiting"}),
}


def families(config: VllmConfig) -> dict[str, Any]:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(config, [0], registry)
    metrics.record_cache_config()
    return {family.name: family for family in registry.collect()}


def test_metric_names_types_and_labels() -> None:
    found = families(vllm_config())
    for kind, names in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)):
        for name in names.split(" "):
            assert f"vllm:{name}" in found, name
            family = found[f"vllm:{name}"]
            assert family.type == kind, name
            labels = set(family.samples[0].labels) - {"le"}
            assert "model_name" in labels, name
            assert ("engine" in labels) == (name != "admission_rejections"), name
            if name in LABELS:
                label, values = LABELS[name]
                assert {sample.labels[label] for sample in family.samples} == values, name
    info = found["vllm:cache_config_info"].samples[0]
    assert info.value == 1
    assert {"block_size", "enable_prefix_caching", "num_gpu_blocks", "engine"} <= set(info.labels)


def test_metrics_of_optional_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    config = vllm_config(
        kv_transfer_config=KVTransferConfig(kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both"),
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=2),
        lora_config=LoRAConfig(),
    )
    config.observability_config.kv_cache_metrics = True
    found = families(config)
    label, values = LABELS["num_requests_kv_fetch_by_stage"]
    samples = found["vllm:num_requests_kv_fetch_by_stage"].samples
    assert {sample.labels[label] for sample in samples} == values
    names = (
        "corrupted_requests kv_block_lifetime_seconds kv_block_idle_before_evict_seconds kv_block_reuse_gap_seconds "
        "spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens "
        "spec_decode_num_accepted_tokens_per_pos lora_requests_info simple_kv_offload_save_outcomes "
        "simple_kv_offload_load_blocks simple_kv_offload_used_blocks simple_kv_offload_pending_store_blocks "
        "simple_kv_offload_info"
    )
    assert [name for name in names.split(" ") if f"vllm:{name}" not in found] == []
    assert "vllm:num_requests_kv_fetch_by_stage" not in families(vllm_config())
