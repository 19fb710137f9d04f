"""`vllm serve -tp 2`: the round trip through all tiers with two worker processes, and their end with the server."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from examples.offload_roundtrip import MAX_MODEL_LEN, random_prompt, roundtrip
from examples.serving import Server, offload_flags, serve
from tests.e2e_cpu.conftest import CPU_POOL_BYTES


def workers_of(server: Server) -> list[psutil.Process]:
    below = psutil.Process(server.process.pid).children(recursive=True)
    return [process for process in below if "vllm.v1.executor.worker_main" in process.cmdline()]


def test_round_trip_of_two_ranks_with_one_pool_and_the_loss_of_one(tiny_glm: Path) -> None:
    pool = f"e2e-{os.getpid()}"
    flags = [*offload_flags(CPU_POOL_BYTES, shared_pool=pool), "-tp", "2", "--dtype", "float32"]
    with serve(tiny_glm, *flags, "--max-model-len", str(MAX_MODEL_LEN)) as server:
        workers = workers_of(server)
        assert len(workers) == 2
        rows = roundtrip(server)
        assert len(rows) == 8
        assert all(row.ok for row in rows), "\n".join(map(str, rows))
        assert server.metric("vllm:prompt_tokens_total") > 0
        names = str(server.request("GET", "/metrics").body).splitlines()
        assert sum(line.startswith("vllm:num_requests_running{") for line in names) == 1

        body = {"model": "m", "prompt": random_prompt(9, 1), "max_tokens": 900, "ignore_eos": True}
        with ThreadPoolExecutor(1) as caller:
            asked = caller.submit(server.request, "POST", "/v1/completions", body)
            time.sleep(0.5)
            workers[1].send_signal(signal.SIGKILL)
            assert asked.result(20).status == 500
        assert server.process.wait(20) == 1
        log = server.log.read_text()
        assert f"worker process {workers[1].pid} of rank 1 was ended by SIGKILL" in log
        assert "Worker TP0" in log
    gone, alive = psutil.wait_procs(workers, timeout=10)
    assert len(gone) == 2
    assert not alive
    assert not list(Path("/dev/shm").glob(f"vllm-kv-*-{pool}-*"))
