"""Load on a running server: requests at a rate, and what each of them took. Layer: L8."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class RequestResult:
    """One request: times of its chunks in seconds from its start, and token counts."""

    chunk_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.chunk_times[0] if self.chunk_times else 0.0

    @property
    def total_s(self) -> float:
        """Time to the last token."""
        return self.chunk_times[-1] if self.chunk_times else 0.0

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first."""
        return (self.total_s - self.ttft_s) / max(1, self.completion_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between chunks."""
        return [after - before for before, after in zip(self.chunk_times, self.chunk_times[1:], strict=False)]


@dataclass(frozen=True)
class LoadPlan:
    """Prompts (token ids), output length, requests per second (inf: all at once) and requests in flight (None: no limit)."""

    prompts: Sequence[list[int]]
    output_tokens: int
    rate: float
    concurrency: int | None
    seed: int


def random_prompts(count: int, length: int, vocab: int, seed: int, shared: int = 0) -> list[list[int]]:
    """Random token ids; the first `shared` of each prompt are the same."""
    chance = random.Random(seed)
    prefix = [chance.randrange(3, vocab) for _ in range(shared)]
    return [prefix + [chance.randrange(3, vocab) for _ in range(length - shared)] for _ in range(count)]


async def run_load(
    client: httpx.AsyncClient, model: str, plan: LoadPlan
) -> tuple[list[RequestResult], float]:
    """Send all prompts; the results and the seconds it took."""
    gate = asyncio.Semaphore(plan.concurrency or len(plan.prompts))
    chance = random.Random(plan.seed)
    start = time.monotonic()
    tasks = []
    for prompt in plan.prompts:
        tasks.append(asyncio.create_task(_one(client, model, prompt, plan.output_tokens, gate)))
        if plan.rate != float("inf"):
            await asyncio.sleep(chance.expovariate(plan.rate))
    results = await asyncio.gather(*tasks)
    return results, time.monotonic() - start


async def _one(
    client: httpx.AsyncClient, model: str, prompt: list[int], output_tokens: int, gate: asyncio.Semaphore
) -> RequestResult:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    result = RequestResult()
    async with gate:
        start = time.monotonic()
        try:
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    result.error = (await reply.aread()).decode(errors="replace")[:200]
                    return result
                async for line in reply.aiter_lines():
                    _take_line(line, time.monotonic() - start, result)
        except httpx.HTTPError as error:
            result.error = repr(error)
    return result


def _take_line(line: str, now: float, result: RequestResult) -> None:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        result.error = chunk["error"]["message"]
    elif chunk["choices"]:
        result.chunk_times.append(now)
    elif chunk.get("usage"):
        result.prompt_tokens = chunk["usage"]["prompt_tokens"]
        result.completion_tokens = chunk["usage"]["completion_tokens"]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the values lie; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(results: Sequence[RequestResult], seconds: float) -> dict[str, float]:
    """Figures of a run; times in milliseconds."""
    good = [result for result in results if result.error is None]
    prompt, output = sum(r.prompt_tokens for r in good), sum(r.completion_tokens for r in good)
    figures: dict[str, float] = {
        "completed": len(good),
        "failed": len(results) - len(good),
        "duration_s": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (prompt + output) / seconds,
    }
    for name, values in (
        ("ttft", [r.ttft_s for r in good]),
        ("tpot", [r.tpot_s for r in good]),
        ("itl", [gap for r in good for gap in r.gaps_s]),
        ("e2e", [r.total_s for r in good]),
    ):
        figures[f"mean_{name}_ms"] = statistics.fmean(values) * 1e3 if values else 0.0
        figures[f"median_{name}_ms"] = percentile(values, 0.5) * 1e3
        figures[f"p99_{name}_ms"] = percentile(values, 0.99) * 1e3
    return figures
