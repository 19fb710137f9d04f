"""An engine without requests ends its copies and then writes nothing, on no tier."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.engine_configs import engine_args, offload_settings, prompt_of
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PATIENCE_S, IDLE_S = 20.0, 1.0


def work_done(processes: list[psutil.Process]) -> tuple[int, float]:
    """Bytes given to the system for writing, and seconds of the processors: copies in memory take those."""
    written = sum(process.io_counters().write_chars for process in processes)
    return written, sum(sum(process.cpu_times()[:2]) for process in processes)


@pytest.mark.parametrize(
    "extra", [{}, {"disk_tier": True, "disk_persist": True}], ids=["host", "kept disk below"]
)
def test_an_idle_engine_writes_nothing(extra: dict[str, Any], tmp_path: Path) -> None:
    fields = offload_settings(1 << 19)
    disk = {"disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": 1 << 20} if "disk_tier" in extra else {}
    fields["kv_transfer_config"]["kv_connector_extra_config"] |= {"lazy_offload": True, **extra, **disk}
    args = engine_args(
        "llama", max_num_batched_tokens=64, max_num_seqs=2, num_gpu_blocks_override=48, **fields
    )
    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=True)
    try:
        for number in range(12):  # more than any tier holds
            engine.add_request(str(number), {"prompt_token_ids": prompt_of(150 + number, number)}, PARAMS)
        while engine.has_unfinished_requests():
            engine.step()
        (core,) = engine.engine_core.core_pids
        processes = [psutil.Process(core)]
        deadline = time.monotonic() + PATIENCE_S
        before = work_done(processes)
        assert before[0] > 0
        while True:
            time.sleep(IDLE_S)
            now = work_done(processes)
            if now[0] == before[0] and now[1] - before[1] < 0.05 * IDLE_S:
                break
            assert time.monotonic() < deadline, f"it never rests: {now[0] - before[0]} bytes in {IDLE_S} s"
            before = now
    finally:
        engine.shutdown()
