"""Internals that outside code reads or calls (interface section 18), and names that must be gone (section 19)."""

from __future__ import annotations

import importlib
from typing import Any
from unittest.mock import Mock

import pytest

from tests.public_api.by_hand import BLOCK, kv_config, request, runner_output, scheduler, vllm_config
from tests.public_api.test_usage_offload import tensors
from vllm import envs
from vllm.config import KVTransferConfig, ModelConfig, SpeculativeConfig
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.simple_kv_offload.records import LoadRequestState


def test_a_request_shows_its_hasher_and_its_tokens() -> None:
    made = request("a", list(range(20)))
    second = Request("b", list(range(20)), made.sampling_params, None, block_hasher=made._block_hasher)
    assert list(second.block_hashes) == list(made.block_hashes)
    plain = Request("c", [1], made.sampling_params, None)
    assert plain._block_hasher is None
    assert made._all_token_ids == list(range(20))
    made._all_token_ids.append(9)
    assert made.all_token_ids[-1] == 9
    assert made.num_tokens == 21


def test_tokens_can_be_replaced_and_hashes_follow() -> None:
    made = request("a", list(range(20)))
    made._all_token_ids = list(range(40))
    made.update_block_hashes()
    assert len(made.block_hashes) == 2
    assert callable(get_request_block_hasher(BLOCK, hash))


def test_preempt_now() -> None:
    sched = scheduler()
    for name in "ab":
        sched.add_request(request(name, [ord(name)] * 20))
    output = sched.schedule()
    sched.update_from_output(output, runner_output(output))
    victim = sched.requests["b"]
    sched.running.remove(victim)
    sched._preempt_request(victim, 0.0)
    assert victim.status == RequestStatus.PREEMPTED
    assert victim.num_computed_tokens == 0
    assert sched.waiting.peek_request() is victim
    assert sched.kv_cache_manager.get_block_ids("b") == ([],)


def test_prefills_under_way() -> None:
    sched = scheduler()
    sched.max_num_scheduled_tokens = 24
    sched.add_request(request("a", list(range(60))))
    assert sched._inflight_prefills == set()
    for expected in (1, 1, 0):
        output = sched.schedule()
        assert len(sched._inflight_prefills) == expected
        sched.update_from_output(output, runner_output(output, a=[] if expected else [7]))


def test_unused_drafts() -> None:
    sched = scheduler()
    made = request("a", list(range(10)), max_tokens=1)
    sched.add_request(made)
    assert sched._drafts_unused(made, 0, 10) is True
    assert sched._drafts_unused(made, 0, 5) is False
    longer = request("b", list(range(10)), max_tokens=9)
    sched.add_request(longer)
    assert sched._drafts_unused(longer, 0, 10) is False


def offloading_scheduler() -> Scheduler:
    config = vllm_config(
        kv_transfer_config=KVTransferConfig(
            kv_connector="SimpleCPUOffloadConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": 2**20},
        )
    )
    return scheduler(config, tensors(kv_config(num_blocks=20)))


def test_a_scheduler_brings_its_connector() -> None:
    sched = offloading_scheduler()
    assert isinstance(sched.connector, SimpleCPUOffloadConnector)
    assert sched.get_kv_connector() is sched.connector
    assert sched.requires_kv_delivery is False
    assert sched.recompute_kv_load_failures is False
    assert not sched._kv_fetch_stages
    assert set((sched._kv_fetch_counts or {}).values()) <= {0}
    made = request("a", list(range(20)))
    sched.add_request(made)
    output = sched.schedule()
    sched.update_from_output(output, runner_output(output))
    assert sched._connector_finished(made) == (False, None)


def test_a_load_in_the_scheduler() -> None:
    sched = offloading_scheduler()
    manager = sched.connector.scheduler_manager  # type: ignore[union-attr]
    assert manager is not None
    prompt = list(range(40))
    sched.add_request(request("a", prompt, max_tokens=2))
    event = -1
    while sched.has_requests():
        output = sched.schedule()
        metadata: Any = output.kv_connector_metadata
        assert output.kv_connector_block_state is None
        event = max(event, metadata.store_event)
        sched.update_from_output(output, runner_output(output))
        if metadata.store_event >= 0:
            manager.store_side.report({metadata.store_event: 1}, ok=True)
    assert event >= 0
    assert sched.reset_prefix_cache() is True
    sched.add_request(request("b", prompt, max_tokens=2))
    output = sched.schedule()
    assert sched.requests["b"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert isinstance(manager._reqs_to_load["b"], LoadRequestState)
    assert list(sched._kv_fetch_stages.values()) == ["in_progress"]
    assert sched._kv_fetch_counts["in_progress"] == 1
    report = runner_output(output)
    report.kv_connector_output = KVConnectorOutput(finished_recving={"b"})
    sched.update_from_output(output, report)
    output = sched.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 32
    assert not sched._kv_fetch_stages


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_stand_in_for_the_connector(is_async: bool, policy: str) -> None:
    """Outside code puts a mock in place of the connector: only calls of the contract count."""
    sched = scheduler(kv=kv_config(num_blocks=50))
    sched.recompute_kv_load_failures = policy == "recompute"
    stand_in = Mock()
    stand_in.get_num_new_matched_tokens.return_value = (32, is_async)
    stand_in.request_finished.return_value = (False, None)
    stand_in.take_events.return_value = ()
    stand_in.has_pending_push_work.return_value = False
    stand_in.reset_cache.return_value = True
    sched.connector = stand_in
    sched.add_request(request("a", list(range(40)), max_tokens=1))
    output = sched.schedule()
    report = runner_output(output)
    if is_async:
        assert output.num_scheduled_tokens == {}
        assert sched.requests["a"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
        report.kv_connector_output = KVConnectorOutput(finished_recving={"a"})
        sched.update_from_output(output, report)
        output = sched.schedule()
        assert output.num_scheduled_tokens == {"a": 8}
        sched.update_from_output(output, runner_output(output))
    else:
        bad = output.scheduled_new_reqs[0].block_ids[0][1]
        report.kv_connector_output = KVConnectorOutput(invalid_block_ids={bad})
        made = sched.requests["a"]
        messages = sched.update_from_output(output, report)
        if policy == "fail":
            assert messages[0].outputs[0].finish_reason is FinishReason.ERROR
        else:
            assert made.num_computed_tokens == 16
            sched.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    stand_in.request_finished.assert_called_once()
    assert sched.reset_prefix_cache(reset_connector=True) is True
    stand_in.reset_cache.assert_called_once()
    assert sched.make_stats() is not None


# --- gone -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [
        "vllm.entrypoints.launchers.cli_args",
        "vllm.v1.executor.ray_executor",
        "vllm.v1.executor.ray_distributed_executor",
    ],
)
def test_modules_that_are_gone(module: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(module)


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND",
        "VLLM_USE_RAY_WRAPPED_PP_COMM",
        "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE",
        "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM",
    ],
)
def test_variables_that_are_gone(name: str) -> None:
    assert not hasattr(envs, name)


def test_members_that_are_gone() -> None:
    assert not hasattr(ModelConfig, "supports_mamba_prefix_caching")
    own = vars(AsyncScheduler)
    assert not {"update_from_output", "_update_request_with_output", "_apply_tokens"} & set(own)


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_speculative_methods_that_are_gone(method: str) -> None:
    with pytest.raises(ValueError, match=method):
        SpeculativeConfig(method=method, num_speculative_tokens=1)


def test_the_mamba_flag_is_accepted_and_changes_nothing() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    assert EngineArgs().mamba_cache_mode is None
    assert parser.parse_args([]).mamba_cache_mode is None
    assert parser.parse_args(["--mamba-cache-mode", "align"]).mamba_cache_mode == "align"


# --- environment ----------------------------------------------------------------------------------------------------

ENVIRONMENT: dict[str, Any] = {
    "VLLM_HOST_IP": "",
    "VLLM_API_KEY": None,
    "VLLM_SERVER_DEV_MODE": False,
    "VLLM_PLUGINS": None,
    "VLLM_CONFIGURE_LOGGING": True,
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_LOGGING_PREFIX": "",
    "VLLM_LOGGING_STREAM": "stdout",
    "VLLM_LOGGING_CONFIG_PATH": None,
    "VLLM_LOG_STATS_INTERVAL": 10,
    "VLLM_ENGINE_READY_TIMEOUT_S": 600,
    "VLLM_ENABLE_V1_MULTIPROCESSING": True,
    "VLLM_USE_V2_MODEL_RUNNER": None,
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": 300,
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": True,
    "VLLM_KV_CACHE_LAYOUT": None,
    "VLLM_USE_SIMPLE_KV_OFFLOAD": False,
    "VLLM_CPU_KVCACHE_SPACE": None,
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": 5,
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": False,
    "VLLM_MAX_N_SEQUENCES": 16384,
    "VLLM_MAX_COMPLETION_PROMPTS": 1024,
    "VLLM_MAX_STOP_STRINGS": 4,
    "VLLM_MAX_NUM_BAD_WORDS": 128,
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": False,
    "VLLM_ALLOW_INSECURE_SERIALIZATION": False,
    "VLLM_MSGPACK_ZERO_COPY_THRESHOLD": 256,
    "VLLM_HTTP_MAX_REQUEST_BODY_SIZE": 33554432,
    "VLLM_COMPUTE_NANS_IN_LOGITS": False,
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": False,
    "VLLM_SKIP_MODEL_NAME_VALIDATION": False,
}


@pytest.mark.parametrize(("name", "default"), ENVIRONMENT.items())
def test_variables_and_their_defaults(monkeypatch: pytest.MonkeyPatch, name: str, default: Any) -> None:
    monkeypatch.delenv(name, raising=False)
    envs.disable_envs_cache()
    assert getattr(envs, name) == default
