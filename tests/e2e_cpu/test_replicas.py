"""`vllm serve -dp 2`: two replicas behind one port with one host pool, asked, measured and ended as one server."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from examples.offload_roundtrip import random_prompt
from examples.serving import Reply, Server, event_flags, offload_flags, serve
from tests.e2e_cpu.conftest import CPU_POOL_BYTES

PROMPT = random_prompt(300, 7)
HIT = 288


def cores_of(server: Server) -> dict[str, psutil.Process]:
    below = psutil.Process(server.process.pid).children(recursive=True)
    found = [process for process in below if "vllm.v1.engine.core_main" in process.cmdline()]
    return {process.environ()["VLLM_LOGGING_PREFIX"].split()[1].rstrip(")"): process for process in found}


def ask(server: Server, rank: int | None, prompt: Any = PROMPT, max_tokens: int = 8) -> Reply:
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    return server.request("POST", "/v1/completions", {**body, "return_token_ids": True}, headers=headers)


def cached(reply: Reply) -> int:
    return int((reply.body["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def by_engine(server: Server, name: str) -> dict[str, float]:
    lines = str(server.request("GET", "/metrics").body).splitlines()
    found = [line for line in lines if line.startswith(name + "{")]
    return {line.split('engine="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in found}


def test_two_replicas_of_one_server_share_a_pool_and_their_end(tiny_llama: Path, tmp_path: Path) -> None:
    pool = f"e2e-dp-{os.getpid()}"
    flags = [
        *offload_flags(CPU_POOL_BYTES, shared_pool=pool),
        *event_flags("tcp://*:0"),
        "--dtype",
        "float32",
    ]
    with serve(tiny_llama, "-dp", "2", *flags, "--max-model-len", "1024") as server:
        cores = cores_of(server)
        assert set(cores) == {"0", "1"}
        assert "(at least) in each of 2 replicas" in server.log.read_text()
        assert set(server.request("GET", "/kv_event_sources").body) == {"0", "1"}

        cold = ask(server, 0)
        server.wait_for_stores()
        found = server.request("POST", "/kv_cache/lookup", {"token_ids": PROMPT}).body
        assert [entry["tokens_by_tier"] for entry in found["engines"]] == [
            {"device": HIT, "host": HIT},
            {"device": 0, "host": HIT},
        ]
        loaded, again = ask(server, 1), ask(server, 1)
        assert [cached(reply) for reply in (cold, loaded, again)] == [0, HIT, HIT]
        answers = [reply.body["choices"][0]["token_ids"] for reply in (cold, loaded, again)]
        assert answers == [answers[0]] * 3
        for wrong in (2, -1):
            refused = ask(server, wrong)
            assert refused.status == 400
            assert f"data_parallel_rank must be in [0, 2), got {wrong}" in refused.body["error"]["message"]

        with ThreadPoolExecutor(6) as callers:
            prompts = [random_prompt(40, 100 + number) for number in range(6)]
            replies = list(callers.map(lambda prompt: ask(server, None, prompt, 60), prompts))
        assert [reply.status for reply in replies] == [200] * 6
        tokens = by_engine(server, "vllm:prompt_tokens_total")
        assert sum(tokens.values()) == 3 * len(PROMPT) + 6 * 40
        assert tokens["0"] > len(PROMPT)
        assert tokens["1"] > 2 * len(PROMPT)
        stats = server.request("GET", "/kv_cache/stats").body
        shown = [(each["engine"], each["tier"], each["shared"]) for each in stats["pools"]]
        assert shown == [(0, "device", False), (0, "host", True), (1, "device", False), (1, "host", True)]
        assert stats["requests"]["admitted"] == 9

        told = server.request("POST", "/reset_prefix_cache?reset_external=true").body
        assert (told["success"], len(told["engines"])) == (True, 2)
        gone = server.request("POST", "/kv_cache/lookup", {"token_ids": PROMPT}).body
        assert [entry["cached_tokens"] for entry in gone["engines"]] == [0, 0]

        with ThreadPoolExecutor(2) as callers:
            asked = [callers.submit(ask, server, rank, [5, 6 + rank], 900) for rank in (0, 1)]
            time.sleep(0.3)
            cores["1"].send_signal(signal.SIGKILL)
            assert [each.result(20).status for each in asked] == [500, 500]
        assert server.process.wait(20) == 1
        log = server.log.read_text()
        assert f"Engine core process {cores['1'].pid} of replica 1 ended unexpectedly with status -9" in log
        assert "(EngineCore 0)" in log
    _, alive = psutil.wait_procs(list(cores.values()), timeout=10)
    assert not alive
    assert not list(Path("/dev/shm").glob(f"vllm-kv-*-{pool}-*"))


def test_replicas_end_with_their_front_end_however_it_ends(tiny_llama: Path) -> None:
    pool = f"e2e-dp-end-{os.getpid()}"
    flags = offload_flags(CPU_POOL_BYTES, shared_pool=pool)
    for number, status in ((signal.SIGTERM, 0), (signal.SIGKILL, -9)):
        with serve(tiny_llama, "-dp", "2", *flags, "--max-model-len", "1024") as server:
            cores = list(cores_of(server).values())
            assert len(cores) == 2
            server.process.send_signal(number)
            assert server.process.wait(20) == status
            _, alive = psutil.wait_procs(cores, timeout=15)
            assert not alive
            assert not list(Path("/dev/shm").glob(f"vllm-kv-*-{pool}-*"))
