"""What offload costs where nothing is ever hit: tokens per second and processor time with it and without.

Measured twice. Two servers take short turns, alone on the machine: what drifts slower than a turn meets both. Where a process
happens to get its memory makes it some percent faster or slower for all its life, so that of several fresh pairs each tells
something else. And one engine has its offload attached and detached in turns (`offload_turns.py`): that tells percents apart.
The median and the middle half of all pairs of neighbouring rounds are what counts. A part of `bench_offload.py`; by itself it
prints its figures and writes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.offload_engines import (
    Engine,
    LoadWatch,
    Model,
    completion,
    dense_model,
    engine,
    max_model_len,
    random_ids,
)
from benchmarks.report import Table
from examples.serving import offload_flags

NAMES = ("off", "eager")
FIGURES = ("tokens/s", "processor ms/token")


@dataclass(frozen=True)
class Load:
    """Sizes: `pairs` of servers, `rounds` of each, after rounds that fill both pools; what is asked in a round.

    `turns`: rounds with and as many without offload in one engine.
    """

    pairs: int = 4
    rounds: int = 10
    requests: int = 8
    prompt: int = 144
    output: int = 16
    concurrency: int = 8
    block_tokens: int = 16
    turns: int = 40

    @property
    def tokens(self) -> int:
        """Tokens of a round."""
        return self.requests * (self.prompt + self.output)

    @property
    def pool_blocks(self) -> int:
        """Blocks of the device's pool and of the CPU pool: room for what runs at once and half as much again."""
        return self.concurrency * (-(-(self.prompt + self.output) // self.block_tokens) + 1) * 3 // 2

    @property
    def filling_rounds(self) -> int:
        """Rounds after which every slot of the CPU pool has been written; from then on each stored block evicts one."""
        return 1 + self.pool_blocks * self.block_tokens // self.tokens


QUICK = Load(pairs=1, rounds=1, requests=4, prompt=40, output=4, concurrency=4, turns=2)


@dataclass
class _Rounds:
    """Figures of one server: one number per round."""

    figures: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in FIGURES})


def throughput(model: Model, load: Load) -> dict[str, Any]:
    """All rounds of all pairs, and by figure the ratio of eager to off: median, middle half, everything."""
    chance = random.Random(23)
    values: dict[str, dict[str, list[float]]] = {name: {figure: [] for figure in FIGURES} for name in NAMES}
    by_pair: list[float] = []
    total = 2 * load.pairs * (load.filling_rounds + load.rounds)
    with tqdm(total=total, desc=f"throughput, {model.name}", unit="round") as bar:
        for number in range(load.pairs):
            rounds = _pair(model, load, chance, number, bar)
            for name in NAMES:
                for figure in FIGURES:
                    values[name][figure] += rounds[name].figures[figure]
            speeds = [rounds[name].figures["tokens/s"] for name in NAMES]
            by_pair.append(statistics.median(_ratios(*speeds)))
    return {
        "model": model.name,
        "pairs": load.pairs,
        "rounds": load.rounds,
        "pool_blocks": load.pool_blocks,
        "median_by_pair": by_pair,
        "figures": {figure: _figure(values, figure) for figure in FIGURES},
        "one_engine": in_turns(model, load),
    }


def in_turns(model: Model, load: Load) -> dict[str, Any]:
    """The same figures of one engine, in a process of its own; blocks and bytes stored in a round."""
    script = Path(__file__).with_name("offload_turns.py")
    with tempfile.TemporaryDirectory(prefix="bench-offload-") as folder:
        out = Path(folder) / "turns.json"
        sizes = {
            "rounds": load.turns,
            "filling-rounds": load.filling_rounds,
            "requests": load.requests,
            "prompt": load.prompt,
            "output": load.output,
            "pool-blocks": load.pool_blocks,
            "vocabulary": model.vocabulary,
            "max-model-len": max_model_len(model),
        }
        options = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
        command = [sys.executable, str(script), "--model", str(model.folder), "--out", str(out), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        told: dict[str, Any] = json.loads(out.read_text())
    rounds = told.pop("rounds")
    values = {
        name: {
            "tokens/s": [load.tokens / wall for wall, _ in rounds[name]],
            "processor ms/token": [cpu / load.tokens * 1e3 for _, cpu in rounds[name]],
        }
        for name in NAMES
    }
    return told | {"rounds": load.turns, "figures": {figure: _figure(values, figure) for figure in FIGURES}}


def _pair(model: Model, load: Load, chance: random.Random, number: int, bar: Any) -> dict[str, _Rounds]:
    """Two fresh servers in turns: ab, ba, ab, …"""
    size = ("--num-gpu-blocks-override", str(load.pool_blocks), "--max-num-seqs", str(load.concurrency))
    flags = {"off": [], "eager": offload_flags(1 << 40, num_cpu_blocks=load.pool_blocks)}
    rounds = {name: _Rounds() for name in NAMES}
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(NAMES)) as starters:
            started = {
                name: starters.submit(
                    lambda own: stack.enter_context(engine(model, *size, *own)), flags[name]
                )
                for name in NAMES
            }
            servers = {name: future.result() for name, future in started.items()}
        for turn in range(load.filling_rounds + load.rounds):
            for name in NAMES if (turn + number) % 2 else reversed(NAMES):
                speed, cpu = _round(servers[name], model, load, chance)
                if turn >= load.filling_rounds:
                    rounds[name].figures["tokens/s"].append(speed)
                    rounds[name].figures["processor ms/token"].append(cpu)
                bar.update()
    return rounds


def _round(server: Engine, model: Model, load: Load, chance: random.Random) -> tuple[float, float]:
    """(tokens per second, processor milliseconds per token, those of copies that end after the answers included)."""
    prompts = [random_ids(chance, model, load.prompt) for _ in range(load.requests)]
    used, started = server.cpu_seconds(), time.perf_counter()
    asyncio.run(_busy(server, prompts, load))
    wall = time.perf_counter() - started
    server.settle()
    return load.tokens / wall, (server.cpu_seconds() - used) / load.tokens * 1e3


async def _busy(server: Engine, prompts: list[list[int]], load: Load) -> None:
    gate = asyncio.Semaphore(load.concurrency)
    limits = httpx.Limits(max_connections=load.concurrency)
    async with httpx.AsyncClient(
        base_url=server.server.url, timeout=600, limits=limits, trust_env=False
    ) as client:

        async def one(prompt: list[int]) -> None:
            async with gate:
                reply = await client.post("/v1/completions", json=completion(prompt, load.output))
                reply.raise_for_status()
                details = reply.json()["usage"].get("prompt_tokens_details") or {}
                assert not details.get("cached_tokens"), "a prompt that was never sent hit"

        await asyncio.gather(*(one(prompt) for prompt in prompts))


def _ratios(off: list[float], eager: list[float]) -> list[float]:
    return [on / without for without, on in zip(off, eager, strict=True)]


def _figure(values: dict[str, dict[str, list[float]]], figure: str) -> dict[str, Any]:
    ratios = _ratios(values["off"][figure], values["eager"][figure])
    quarters = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        **{name: statistics.median(values[name][figure]) for name in NAMES},
        "eager_to_off": quarters[1],
        "middle_half": [quarters[0], quarters[2]],
        "all": ratios,
    }


def sides(result: dict[str, Any]) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Both measurements by name."""
    return ("two servers", result), ("one engine", result["one_engine"])


def throughput_table(result: dict[str, Any]) -> Table:
    """The figures as a table."""
    text = (
        f"{result['model']}, 8 clients, every prompt sent once: all cost, no use. {result['pairs']} fresh pairs of servers, "
        f"{result['rounds']} short rounds each in turns, nothing else running; the ratio is the median over all pairs of "
        "neighbouring rounds, the last column its middle half. The CPU pool was written once before, so that every stored "
        "block evicts one. Medians of the single pairs of servers: "
        f"{', '.join(f'{ratio:.3f}' for ratio in result['median_by_pair'])}. One engine: the same rounds in one process without "
        f"a front end, {result['one_engine']['rounds']} with its offload attached and as many with it detached, in turns; a round "
        f"stores {result['one_engine']['bytes_per_round'] / 1e6:.1f} MB."
    )
    body = []
    for where, measured in sides(result):
        for figure in FIGURES:
            row = measured["figures"][figure]
            digits = 1 if figure == "tokens/s" else 3
            low, high = row["middle_half"]
            values = [f"{row[name]:.{digits}f}" for name in NAMES]
            ratios = [f"{row['eager_to_off']:.3f}", f"{low:.3f} … {high:.3f}"]
            body.append([f"{figure}, {where}", *values, *ratios])
    columns = ("figure", *NAMES, "eager / off", "middle half")
    return Table("What offload costs without any hit", text, columns, body)


def main(arguments: list[str] | None = None) -> int:
    """Command line: this part alone, printed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and one round: no meaning")
    parser.add_argument("--pairs", type=int, help="of fresh servers")
    parser.add_argument("--rounds", type=int, help="of each pair")
    parser.add_argument("--turns", type=int, help="of one engine with and without")
    args = parser.parse_args(arguments)
    default = QUICK if args.quick else Load()
    load = Load(
        args.pairs or default.pairs,
        args.rounds or default.rounds,
        default.requests,
        default.prompt,
        default.output,
        default.concurrency,
        turns=args.turns or default.turns,
    )
    watch = LoadWatch()
    with tempfile.TemporaryDirectory(prefix="bench-offload-") as folder:
        table = throughput_table(throughput(dense_model(args.quick, Path(folder)), load))
    print(table.text, "", *(" | ".join(row) for row in (table.columns, *table.rows)), sep="\n")
    print(f"{watch.report()['cores_used_by_others']:.2f} cores were taken by other programs.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
