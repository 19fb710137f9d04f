"""Enum orders, the error tree, records and small functions whose values the interface fixes."""

from __future__ import annotations

import logging

import pytest

from tests.public_api.names_connectors import ABSTRACT_METHODS, METRIC_NAMES
from tests.public_api.names_kv import LAYOUTS, QUANT_MODES
from tests.public_api.names_requests import STATUS_ORDER
from vllm import exceptions, outputs
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    VALID_KV_OFFLOAD_BACKENDS,
    SimpleCPUOffloadConnector,
)
from vllm.logger import configure_logging, init_logger
from vllm.outputs import RequestError
from vllm.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    validate_thinking_token_budget,
)
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core_ready import EngineCoreReadyResponse
from vllm.v1.engine.core_utilities import utility_methods
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus
from vllm.v1.simple_kv_offload.metrics import OUTCOME_TO_FIELD, MetricName


def test_request_statuses_are_ordered_and_end_after_preempted() -> None:
    assert [status.name for status in sorted(RequestStatus)] == STATUS_ORDER
    for status in RequestStatus:
        assert RequestStatus.is_finished(status) == (status > RequestStatus.PREEMPTED)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("FINISHED_STOPPED", "stop"),
        ("FINISHED_LENGTH_CAPPED", "length"),
        ("FINISHED_IGNORED", "length"),
        ("FINISHED_ABORTED", "abort"),
        ("FINISHED_ERROR", "error"),
        ("FINISHED_REPETITION", "repetition"),
        ("WAITING_FOR_STREAMING_REQ", "stop"),
        ("RUNNING", None),
    ],
)
def test_finish_reasons(status: str, reason: str | None) -> None:
    found = RequestStatus.get_finished_reason(RequestStatus[status])
    assert (None if found is None else str(found)) == reason


def test_finish_reasons_are_numbers_on_the_wire() -> None:
    assert [(int(r), str(r)) for r in FinishReason] == [
        (0, "stop"), (1, "length"), (2, "abort"), (3, "error"), (4, "repetition"),
    ]  # fmt: skip


def test_quant_modes() -> None:
    assert {name: mode.value for name, mode in KVQuantMode.__members__.items()} == QUANT_MODES
    assert KVQuantMode.CUSTOM is KVQuantMode.OCTAVE_K3V4
    octaves = [mode for mode in KVQuantMode if mode.is_octave]
    assert [int(mode) for mode in octaves] == [12, 13, 14]
    assert [int(mode) for mode in KVQuantMode if mode.is_turboquant] == [6, 7, 8, 9]
    assert [int(mode) for mode in KVQuantMode if mode.is_per_token_head] == [2, 3, 4]
    assert KVQuantMode.ULTRAQUANT_4BIT.is_ultraquant
    assert KVQuantMode.NVFP4.is_nvfp4
    assert get_kv_quant_mode("auto") is KVQuantMode.NONE
    assert get_kv_quant_mode("fp8") is KVQuantMode.FP8_PER_TENSOR


def test_layouts() -> None:
    assert [layout.name for layout in KVCacheLayout] == LAYOUTS
    assert [layout.name for layout in KVCacheLayout if layout.is_block_outermost] == [
        "BLHNC",
        "BLNHC",
        "BHLNC",
    ]


def test_hit_sources_and_their_order() -> None:
    assert CacheHitSource.DEVICE == "device"
    assert CacheHitSource.outermost([CacheHitSource.HOST, CacheHitSource.DEVICE]) is CacheHitSource.HOST
    assert CacheHitSource.outermost([CacheHitSource.P2P, CacheHitSource.DISK]) is CacheHitSource.DISK


def test_offload_metric_names_and_outcomes() -> None:
    for name, value in METRIC_NAMES.items():
        assert getattr(MetricName, name) == value, name
    assert set(OUTCOME_TO_FIELD.values()) == {
        "stored", "dropped_cpu_full", "dropped_request_gone", "skipped_already_cached", "skipped_in_flight",
        "dropped_null_block", "dropped_not_hashed",
    }  # fmt: skip
    assert len(OUTCOME_TO_FIELD) == 7
    assert set(VALID_KV_OFFLOAD_BACKENDS) == {"cpu", "disk"}


def test_connector_base_is_abstract_in_exactly_these_methods() -> None:
    assert KVConnectorBase_V1.__abstractmethods__ == ABSTRACT_METHODS
    assert "request_finished_all_groups" in SupportsHMA.__abstractmethods__
    assert supports_hma(SimpleCPUOffloadConnector)
    assert not supports_hma(KVConnectorBase_V1)


@pytest.mark.parametrize(
    ("child", "parent"),
    [
        ("VLLMClientError", "VLLMError"),
        ("VLLMServerError", "VLLMError"),
        ("VLLMValidationError", "VLLMClientError"),
        ("VLLMNotFoundError", "VLLMClientError"),
        ("VLLMUnprocessableEntityError", "VLLMClientError"),
        ("GenerationError", "VLLMServerError"),
        ("RetryableRequestError", "GenerationError"),
        ("QueueOverflowError", "GracefulHTTPError"),
        ("MaxQueuedTokensError", "GracefulHTTPError"),
    ],
)
def test_error_tree(child: str, parent: str) -> None:
    assert issubclass(getattr(exceptions, child), getattr(exceptions, parent))


def test_validation_errors_name_the_parameter_and_are_no_value_errors() -> None:
    error = exceptions.VLLMValidationError("bad", parameter="n", value=-1)
    assert (error.parameter, error.value) == ("n", -1)
    assert not isinstance(error, ValueError)


def test_request_errors_become_exceptions() -> None:
    assert RequestError("a", "b") == RequestError("a", "b", False)
    assert isinstance(
        RequestError("invalid_request", "no").to_exception(),
        exceptions.GenerationError | exceptions.VLLMValidationError,
    )
    retryable = RequestError("engine_paused", "later", retryable=True).to_exception()
    assert isinstance(retryable, exceptions.RetryableRequestError)
    with pytest.raises(AttributeError):
        RequestError("a", "b").code = "c"  # type: ignore[misc]


def test_dead_engine_texts() -> None:
    assert str(EngineDeadError()) == EngineDeadError.ENGINE_DEAD_MESSAGE
    assert EngineDeadError.CLIENT_MESSAGE


def test_loggers_live_under_vllm() -> None:
    logger = init_logger("vllm.some.module")
    assert logger.name == "vllm.some.module"
    configure_logging()
    assert logging.getLogger("vllm").propagate is False
    assert callable(logger.info_once)
    assert callable(logger.warning_once)


@pytest.mark.parametrize(("given", "kept"), [(0, 0), (5, 5), (-1, None), (None, None)])
def test_thinking_budgets(given: int | None, kept: int | None) -> None:
    assert validate_thinking_token_budget(given) == kept


@pytest.mark.parametrize("given", [True, False, 1.0, -2])
def test_thinking_budgets_that_are_refused(given: object) -> None:
    with pytest.raises(exceptions.VLLMValidationError) as caught:
        validate_thinking_token_budget(given)  # type: ignore[arg-type]
    assert caught.value.parameter == "thinking_token_budget"


def test_structured_outputs_take_exactly_one_constraint() -> None:
    assert StructuredOutputsParams(regex="a+").regex == "a+"
    with pytest.raises(exceptions.VLLMValidationError):
        StructuredOutputsParams()
    with pytest.raises(exceptions.VLLMValidationError):
        StructuredOutputsParams(json={}, regex="a+")


def test_stop_ids_follow_the_generation_config() -> None:
    params = SamplingParams()
    params.update_from_generation_config({}, 7)
    assert params.eos_token_id == 7
    assert 7 in params.all_stop_token_ids
    ignoring = SamplingParams(ignore_eos=True)
    ignoring.update_from_generation_config({}, 7)
    assert ignoring.eos_token_id is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("temperature", -1.0),
        ("temperature", 2.5),
        ("top_p", 0.0),
        ("top_k", -2),
        ("min_p", 1.5),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("stream_interval", 0),
        ("stop", [""]),
    ],
)
def test_sampling_values_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(exceptions.VLLMValidationError):
        SamplingParams(**{field: value})


def test_sampling_values_that_are_adjusted() -> None:
    greedy = SamplingParams(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1)
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert SamplingParams(stop="x").stop == ["x"]
    assert SamplingParams(prompt_logprobs=1).skip_reading_prefix_cache is True
    assert SamplingParams.from_optional(logit_bias={"3": 200.0}).logit_bias == {3: 100.0}
    assert SamplingParams().output_kind is RequestOutputKind.CUMULATIVE


def test_unknown_keywords_of_a_request_output_are_ignored() -> None:
    output = outputs.RequestOutput("r", None, [1], None, [], True, brand_new=3)
    assert output.request_id == "r"


def test_pooled_results_keep_an_error() -> None:
    base = outputs.PoolingRequestOutput(
        "r", outputs.PoolingOutput([1.0]), [1], 0, True, error=RequestError("x", "y")
    )
    assert outputs.EmbeddingRequestOutput.from_base(base).error == RequestError("x", "y")


@pytest.mark.parametrize(
    "name",
    [
        "get_supported_tasks", "add_lora", "remove_lora", "list_loras", "pin_lora", "collective_rpc", "profile",
        "save_sharded_state", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache", "pause_scheduler",
        "resume_scheduler", "sleep", "wake_up", "execute_dummy_batch", "set_weight_version", "get_weight_version",
        "get_kv_cache_group_metadata",
    ],
)  # fmt: skip
def test_utilities_of_the_core(name: str) -> None:
    class Anything:
        def __getattr__(self, attribute: str) -> Anything:
            return self

    assert name in utility_methods(Anything())  # type: ignore[arg-type]


def test_ready_message() -> None:
    wanted = (
        "max_model_len num_gpu_blocks block_size dp_stats_address dtype vllm_version world_size data_parallel_size "
        "tensor_parallel_size pipeline_parallel_size decode_context_parallel_size data_parallel_rank max_num_seqs "
        "max_num_batched_tokens instance_id supports_lora max_loras mamba_block_size kv_cache_size_tokens "
        "kv_cache_max_concurrency kv_events_config weight_transfer_backend enable_sleep_mode "
        "supports_draft_weight_updates effective_attention_block_size"
    )
    elastic = "coord_store_port coordinator_input_address coordinator_output_address"
    assert " ".join(EngineCoreReadyResponse.__struct_fields__) == f"{wanted} {elastic}"
