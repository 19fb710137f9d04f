"""The servers and models of the offload benchmark, and what a client can see of them: answers with times, counters, load."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from examples.serving import Server, serve
from scripts.demo_model import demo_model
from vllm.model_executor.model_loader.tiny import make_tiny

SETTLE_TIMEOUT_S = 120.0
MAX_MODEL_LEN = 8192
_LAYERS = 8
# A hybrid of the same make as tiny:glm5_next in which a prompt is real work: 33 M parameters, six recurrent layers and two
# of sparse latent attention. Its blocks hold 48 tokens.
HYBRID: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 192,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "index_topk": 512,
    "index_head_dim": 32,
    "index_n_heads": 8,
    "linear_head_dim": 32,
    "linear_num_heads": 8,
    "max_position_embeddings": MAX_MODEL_LEN,
    "mlp_layer_types": ["dense", *["sparse"] * (_LAYERS - 1)],
    "layer_types": [*["linear_attention"] * 3, "indexed_attention"] * 2,
    "indexer_types": ["full"] * _LAYERS,
}


@dataclass(frozen=True)
class Model:
    """A checkpoint under test; prompts are random ids below `vocabulary`."""

    name: str
    folder: Path
    vocabulary: int = 256


def dense_model(quick: bool, folder: Path) -> Model:
    """SmolLM2-135M, or a tiny one."""
    if quick:
        return Model("tiny llama", make_tiny("llama", folder / "llama"))
    return Model("SmolLM2-135M (dense)", demo_model(), vocabulary=40000)


def hybrid_model(quick: bool, folder: Path) -> Model:
    """The hybrid with a scratch group, of a size with real work or tiny."""
    if quick:
        return Model("tiny glm5_next", make_tiny("glm5_next", folder / "glm"))
    return Model("glm5_next, 33M (hybrid)", make_tiny("glm5_next", folder / "glm", overrides=HYBRID))


def random_ids(chance: random.Random, model: Model, count: int) -> list[int]:
    """A prompt that no other one shares a block with."""
    return [chance.randrange(100 if model.vocabulary > 256 else 3, model.vocabulary) for _ in range(count)]


@dataclass
class Reply:
    """One streamed answer: seconds, tokens, and how many of the prompt's tokens came from which tier."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    by_source: dict[str, int] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)


class Engine:
    """A running server, seen from outside."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.client = httpx.Client(base_url=server.url, timeout=600.0, trust_env=False)

    def ask(self, prompt: list[int], max_tokens: int = 1) -> Reply:
        """A greedy completion as a stream."""
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        started = time.perf_counter()
        first: float | None = None
        ids: list[int] = []
        usage: dict[str, Any] = {}
        with self.client.stream(
            "POST", "/v1/completions", json=completion(prompt, max_tokens) | stream
        ) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"HTTP {answer.status_code}: {answer.read().decode()[:500]}")
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if chunk.get("choices"):
                    first = first or time.perf_counter() - started
                    ids += chunk["choices"][0].get("token_ids") or []
                usage = chunk.get("usage") or usage
        details = usage.get("prompt_tokens_details") or {}
        assert first is not None, "a stream without a token"
        sources = dict(details.get("cached_tokens_by_source") or {})
        return Reply(first, usage["prompt_tokens"], details.get("cached_tokens") or 0, sources, ids)

    def stats(self) -> dict[str, Any]:
        """`GET /kv_cache/stats`."""
        reply: dict[str, Any] = self.client.get("/kv_cache/stats").json()
        return reply

    def settle(self) -> None:
        """Returns when no copy is planned or under way on any tier.

        Raises:
            TimeoutError: copies never end.
        """
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        quiet = 0
        while quiet < 3:
            stats = self.stats()
            busy = stats["pending_store_blocks"] or sum(t["blocks_in_flight"] for t in stats["transfers"])
            quiet = 0 if busy else quiet + 1
            if time.monotonic() > deadline:
                raise TimeoutError(f"copies never end: {stats['transfers']}")
            time.sleep(0.05)

    def pool(self, tier: str) -> dict[str, Any]:
        """Counters of one pool."""
        (found,) = [pool for pool in self.stats()["pools"] if pool["tier"] == tier]
        return dict(found)

    def moved(self, tier: str, direction: str) -> int:
        """Bytes copied so far between a tier and the one above it."""
        return sum(
            t["bytes_done"]
            for t in self.stats()["transfers"]
            if (t["tier"], t["direction"]) == (tier, direction)
        )

    def drop(self, external: bool = False) -> None:
        """Forgets the device's cache, with `external` every tier's."""
        if not self.server.reset(external):
            raise RuntimeError(f"a reset of an idle server failed\n{self.server.log_tail()}")

    def cpu_seconds(self) -> float:
        """Processor time of the server and its children so far."""
        root = psutil.Process(self.server.process.pid)
        times = [p.cpu_times() for p in (root, *root.children(recursive=True))]
        return sum(t.user + t.system for t in times)


def completion(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """The body of a greedy completion of exactly `max_tokens` tokens."""
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
    return body | {"ignore_eos": True, "return_token_ids": True}


def max_model_len(model: Model) -> int:
    """What the model takes, up to `MAX_MODEL_LEN`."""
    length: int = json.loads((model.folder / "config.json").read_text())["max_position_embeddings"]
    return min(MAX_MODEL_LEN, length)


@contextmanager
def engine(model: Model, *flags: str) -> Iterator[Engine]:
    """A server of `model` in float32 that ends with the block."""
    common = ("--dtype", "float32", "--max-model-len", str(max_model_len(model)))
    with serve(model.folder, *common, *flags) as server:
        made = Engine(server)
        try:
            yield made
        finally:
            made.client.close()


class LoadWatch:
    """How much of the machine other programs took while the benchmark ran."""

    def __init__(self) -> None:
        self.load_before = os.getloadavg()[0]
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """(wall clock, busy seconds of all cores, seconds of this process and its ended children)."""
        cores, own = psutil.cpu_times(), psutil.Process().cpu_times()
        busy = sum(cores) - cores.idle - getattr(cores, "iowait", 0.0) - getattr(cores, "guest", 0.0)
        mine = own.user + own.system + own.children_user + own.children_system
        return time.monotonic(), busy, mine

    def report(self) -> dict[str, float]:
        """Cores that others used on average; call it when all servers have ended."""
        wall, busy, mine = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return {
            "wall_s": wall,
            "load_average_before": self.load_before,
            "cores": float(os.cpu_count() or 1),
            "cores_used_by_others": max(0.0, (busy - mine) / wall),
        }
