"""The CPU worker: size of its KV cache, refusals, sleep."""

from __future__ import annotations

import pytest

from tests.helpers.engine_configs import engine_config
from tests.helpers.hand_scheduler import HandScheduler, start_worker
from vllm.config import LoRAConfig
from vllm.v1.worker.cpu_worker import CPUWorker, kv_cache_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("chosen", "available", "expected"),
    [
        (None, 100 * GIB, 4 * GIB),
        (None, 6 * GIB, 3 * GIB),
        (5 * GIB, 100 * GIB, 5 * GIB),
        (5 * GIB, GIB, 5 * GIB),
    ],
)
def test_size_of_the_kv_cache(chosen, available, expected) -> None:
    assert kv_cache_bytes(chosen, available) == expected


def test_features_nobody_has_are_refused_at_start() -> None:
    config = engine_config()
    config.lora_config = LoRAConfig(max_loras=1)
    with pytest.raises(ValueError, match="LoRA"):
        CPUWorker(config, 0, 0, "")
    config.lora_config = None
    config.model_config.runner_type = "pooling"
    with pytest.raises(ValueError, match="runner='pooling'"):
        CPUWorker(config, 0, 0, "")


def test_sleep_gives_the_pages_back_and_the_worker_goes_on() -> None:
    worker, plan = start_worker(engine_config())
    before = HandScheduler(worker, plan)
    before.add("a", [5, 6, 7, 8])
    expected = before.run_alone("a", 5)
    before.finish("a")
    before.step({})
    worker.sleep(1)
    assert not any(tensor.any() for tensor in worker.model_runner.pages.raw.values())
    worker.wake_up(["weights"])
    worker.wake_up()
    after = HandScheduler(worker, plan)
    after.add("a", [5, 6, 7, 8])
    assert after.run_alone("a", 5) == expected
    with pytest.raises(ValueError, match="level 2"):
        worker.sleep(2)
    with pytest.raises(ValueError, match="must be 1 or 2, got 5"):
        worker.sleep(5)
    worker.shutdown()
    with pytest.raises(RuntimeError, match="not loaded"):
        worker.get_model()


def test_memory_can_be_measured_before_there_is_a_cache() -> None:
    config = engine_config("glm5_next")
    worker = CPUWorker(config, 0, 0, "")
    worker.init_device()
    worker.load_model()
    worker.model_runner.profile_run(40)
    worker.update_max_model_len(64)
    assert config.model_config.max_model_len == 64
    worker.check_health()
