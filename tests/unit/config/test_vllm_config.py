import dataclasses
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from tests.helpers.model_folders import write_model_folder
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    get_current_vllm_config,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)


def test_parts_have_defaults_and_are_not_copied():
    cache = CacheConfig()
    config = VllmConfig(cache_config=cache)
    assert config.cache_config is cache
    assert config.model_config is None
    assert config.kv_transfer_config is None
    assert (cache.block_size, config.scheduler_config.async_scheduling) == (16, True)
    assert config.instance_id
    with pytest.raises(TypeError):
        VllmConfig(no_such=1)
    with pytest.raises(ValidationError, match="shutdown_timeout"):
        VllmConfig(shutdown_timeout=-1)


def test_partial_records_are_accepted():
    model = SimpleNamespace(is_hybrid=False, is_attention_free=False, runner_type="generate")
    assert VllmConfig(model_config=model).model_config is model


def test_block_size_of_the_user_is_kept():
    assert VllmConfig(cache_config=CacheConfig(block_size=32)).cache_config.block_size == 32


def scheduler(**values):
    return SchedulerConfig.default_factory(**values)


def test_async_scheduling_is_on_where_it_works(monkeypatch):
    def resolved(**parts):
        return VllmConfig(**parts).scheduler_config.async_scheduling

    assert resolved(scheduler_config=scheduler(async_scheduling=False)) is False
    assert resolved(scheduler_config=scheduler(runner_type="pooling")) is False
    assert resolved(speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=1)) is False
    assert resolved(speculative_config=SpeculativeConfig(method="eagle", num_speculative_tokens=1)) is True
    assert resolved(parallel_config=ParallelConfig(pipeline_parallel_size=2)) is True
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert resolved(parallel_config=ParallelConfig(pipeline_parallel_size=2)) is False


@pytest.mark.parametrize(
    ("v2", "stages", "asynchronous", "batches"),
    [("1", 1, False, 1), ("1", 1, True, 2), ("1", 3, True, 4), ("0", 1, True, 2), ("0", 3, False, 3)],
)
def test_batches_in_flight(monkeypatch, v2, stages, asynchronous, batches):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", v2)
    config = VllmConfig(
        parallel_config=ParallelConfig(pipeline_parallel_size=stages),
        scheduler_config=scheduler(async_scheduling=asynchronous, max_num_batched_tokens=256),
    )
    assert config.use_v2_model_runner is (v2 == "1")
    assert (config.max_concurrent_batches, config.max_in_flight_tokens) == (batches, batches * 256)


def test_lookahead():
    plain = VllmConfig()
    assert (plain.num_speculative_tokens, plain.num_lookahead_tokens, plain.num_hash_lookahead_tokens) == (
        0,
        0,
        0,
    )
    assert plain.num_prefill_lookahead_tokens == 0
    assert plain.is_mm_encoder_only is False
    eagle = VllmConfig(speculative_config=SpeculativeConfig(method="eagle", num_speculative_tokens=3))
    assert (eagle.num_speculative_tokens, eagle.num_lookahead_tokens, eagle.num_hash_lookahead_tokens) == (
        3,
        3,
        0,
    )
    ngram = VllmConfig(speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=3))
    assert ngram.num_lookahead_tokens == 0


def test_interleaving_keeps_compressed_states_whole():
    config = VllmConfig(
        parallel_config=ParallelConfig(tensor_parallel_size=2, decode_context_parallel_size=2)
    )
    groups = [
        SimpleNamespace(kv_cache_spec=SimpleNamespace(dcp_sharded=sharded, tokens_per_state=tokens))
        for sharded, tokens in ((True, 4), (True, 6), (False, 7), (True, 1))
    ]
    config.adjust_dcp_kv_cache_interleave_size(groups)
    assert config.parallel_config.cp_kv_cache_interleave_size == 12
    alone = VllmConfig()
    alone.adjust_dcp_kv_cache_interleave_size(groups)
    assert alone.parallel_config.cp_kv_cache_interleave_size == 1


@pytest.mark.parametrize(
    ("simple", "connector", "more"),
    [("0", "OffloadingConnector", {"offload_prompt_only": False}), ("1", "SimpleCPUOffloadConnector", {})],
)
def test_offloading_size_chooses_the_host_tier(monkeypatch, simple, connector, more):
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", simple)
    config = VllmConfig(cache_config=CacheConfig(kv_offloading_size=1.5))
    transfer = config.kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_role) == (connector, "kv_both")
    assert list(transfer.kv_connector_extra_config.items()) == [
        ("cpu_bytes_to_use", 3 * 2**29),
        *more.items(),
    ]
    assert transfer.kv_load_failure_policy == "recompute", "the copies are a cache"
    assert dataclasses.replace(config).kv_transfer_config.kv_connector == connector
    chosen = KVConnectorFactory.get_connector_class(transfer)
    assert issubclass(chosen, SimpleCPUOffloadConnector), "either name is the one CPU offload there is"


def test_offloading_size_never_replaces_an_explicit_connector():
    with pytest.raises(ValueError, match=r"kv_offloading_size=1\.0.*kv_connector='ExampleConnector'"):
        VllmConfig(
            cache_config=CacheConfig(kv_offloading_size=1),
            kv_transfer_config=KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"),
        )


def test_offloading_size_keeps_what_is_given_without_a_connector():
    given = {"eviction_policy": "arc", "offload_prompt_only": True}
    config = VllmConfig(
        cache_config=CacheConfig(kv_offloading_size=1),
        kv_transfer_config=KVTransferConfig(engine_id="e", kv_connector_extra_config=given),
    )
    for transfer in (config.kv_transfer_config, dataclasses.replace(config).kv_transfer_config):
        assert transfer.kv_connector == "OffloadingConnector"
        assert transfer.kv_connector_extra_config == {"cpu_bytes_to_use": 2**30, **given}
        assert (transfer.engine_id, transfer.kv_load_failure_policy) == ("e", "fail")
    with pytest.raises(ValueError, match=r"kv_offloading_size=1\.0 is not cpu_bytes_to_use=5; give one"):
        VllmConfig(
            cache_config=CacheConfig(kv_offloading_size=1),
            kv_transfer_config=KVTransferConfig(kv_connector_extra_config={"cpu_bytes_to_use": 5}),
        )


def test_an_offloading_size_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"kv_offloading_size=1e-12 \(GiB\) is less than a byte"):
        VllmConfig(cache_config=CacheConfig(kv_offloading_size=1e-12))


def test_offloading_backend_must_exist():
    with pytest.raises(ValueError, match="lmcache"):
        VllmConfig(cache_config=CacheConfig(kv_offloading_size=1, kv_offloading_backend="lmcache"))


def test_cfg_05_offload_without_prefix_caching_warns(caplog):
    VllmConfig(cache_config=CacheConfig(kv_offloading_size=1, enable_prefix_caching=False))
    assert "which is off" in caplog.text


def test_event_settings_that_do_nothing_warn(caplog):
    VllmConfig(
        cache_config=CacheConfig(enable_prefix_caching=False),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True),
    )
    VllmConfig(kv_events_config=KVEventsConfig(publisher="zmq"))
    assert "there will be no events" in caplog.text
    assert "nothing is published" in caplog.text


@pytest.fixture
def hybrid(tmp_path):
    return ModelConfig(write_model_folder(tmp_path, layer_types=["linear_attention", "full_attention"]))


def test_recurrent_state_mode_follows_prefix_caching(hybrid):
    on = VllmConfig(model_config=hybrid).cache_config
    assert (on.mamba_cache_mode, on.mamba_block_size) == ("align", 16)
    off = VllmConfig(model_config=hybrid, cache_config=CacheConfig(enable_prefix_caching=False)).cache_config
    assert (off.mamba_cache_mode, off.mamba_block_size) == ("none", 512)


def test_recurrent_prefix_caching_needs_chunked_prefill(hybrid):
    with pytest.raises(ValueError, match="chunked prefill"):
        VllmConfig(
            model_config=hybrid,
            scheduler_config=scheduler(enable_chunked_prefill=False, max_num_batched_tokens=8192),
        )
    with pytest.raises(ValueError, match="disable_chunked_mm_input"):
        VllmConfig(model_config=hybrid, scheduler_config=scheduler(disable_chunked_mm_input=True))


UNCHUNKED = {"max_model_len": 512, "enable_chunked_prefill": False}


@pytest.mark.parametrize(
    ("limits", "drafts", "words"),
    [
        (
            {"max_num_batched_tokens": 4, "max_num_seqs": 2},
            4,
            "max_num_batched_tokens=4.*num_speculative_tokens=4",
        ),
        ({"max_num_batched_tokens": 513, **UNCHUNKED}, 2, "max_model_len=512 could never run"),
        ({"max_num_scheduled_tokens": 511, **UNCHUNKED}, 0, "max_num_scheduled_tokens=511"),
    ],
)
def test_steps_in_which_a_prompt_could_never_run_are_refused(tmp_path, limits, drafts, words):
    model = ModelConfig(write_model_folder(tmp_path))
    assert model.max_model_len == 512
    more = (
        {"speculative_config": SpeculativeConfig(method="mtp", num_speculative_tokens=drafts)}
        if drafts
        else {}
    )
    with pytest.raises(ValueError, match=words):
        VllmConfig(model_config=model, scheduler_config=scheduler(**limits), **more)


def test_a_step_with_room_for_the_drafts_beside_the_longest_prompt_is_enough(tmp_path):
    model = ModelConfig(write_model_folder(tmp_path))
    limits = scheduler(max_num_batched_tokens=514, **UNCHUNKED)
    drafter = SpeculativeConfig(method="mtp", num_speculative_tokens=2)
    assert VllmConfig(model_config=model, scheduler_config=limits, speculative_config=drafter)


def test_current_config_is_scoped():
    config = VllmConfig()
    with set_current_vllm_config(config):
        assert get_current_vllm_config() is config
    assert get_current_vllm_config() is not config
