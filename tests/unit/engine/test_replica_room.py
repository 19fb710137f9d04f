"""Replicas that a machine has no room for, or whose KV events would meet at one address: no process starts."""

from __future__ import annotations

import pytest

from tests.helpers.model_folders import write_model_folder
from vllm.config import ParallelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cuda import CudaPlatform
from vllm.v1.engine import core_connection
from vllm.v1.engine.core_connection import SocketConnection


@pytest.fixture
def folder(tmp_path):
    return write_model_folder(tmp_path / "m")


def build(folder, **settings):
    return EngineArgs(str(folder), **settings).create_engine_config()


@pytest.mark.parametrize("made_by_hand", [False, True])
def test_more_replicas_than_the_machine_has_room_for_are_refused(folder, monkeypatch, made_by_hand):
    """Before any process starts, also of a configuration that no arguments were checked for."""

    def start(count):
        if made_by_hand:
            SocketConnection(
                VllmConfig(parallel_config=ParallelConfig(data_parallel_size=count)), None, False
            )
        else:
            build(folder, data_parallel_size=count)

    monkeypatch.setattr(core_connection, "start_cores", lambda *args: pytest.fail("a process starts"))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.delenv("VLLM_ALLOW_CROWDED_REPLICAS", raising=False)
    told = "data_parallel_size=5: each replica needs a processor of its own, and this process may use 4"
    with pytest.raises(ValueError, match=told):
        start(5)
    build(folder, data_parallel_size=4)
    monkeypatch.setenv("VLLM_ALLOW_CROWDED_REPLICAS", "1")
    build(folder, data_parallel_size=5)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(CudaPlatform, "get_device_count", lambda: 4)
    CudaPlatform.check_replicas(2, 2)
    told = (
        "data_parallel_size=3, tensor_parallel_size=2: each rank .* GPU of its own, and this process sees 4"
    )
    with pytest.raises(ValueError, match=told):
        CudaPlatform.check_replicas(3, 2)


@pytest.mark.parametrize(
    ("replicas", "events", "told"),
    [
        (2, {"replay_endpoint": "tcp://*:5558"}, "overlap: data-parallel rank 1 needs them at least 2 apart"),
        (1, {"replay_endpoint": "tcp://*:5557"}, "overlap: data-parallel rank 0"),
        (3, {"endpoint": "tcp://*:65534"}, r"endpoint='tcp://\*:65534' needs port 65536"),
    ],
)
def test_event_addresses_that_meet_are_refused_before_an_engine_starts(folder, replicas, events, told):
    with pytest.raises(ValueError, match=told):
        build(
            folder,
            data_parallel_size=replicas,
            kv_events_config={"enable_kv_cache_events": True, **events},
        )
    build(folder, data_parallel_size=replicas, kv_events_config={"enable_kv_cache_events": False, **events})
    apart = {"enable_kv_cache_events": True, "replay_endpoint": "tcp://*:5600"}
    build(folder, data_parallel_size=replicas, kv_events_config=apart)
