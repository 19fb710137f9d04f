"""What offload costs where nothing is ever hit: tokens per second and processor time with it and without.

Measured twice, each time in rounds of both sides in turns (`paired.py`). Two servers, alone on the machine: what a user has, but where
a process happens to get its memory makes it some percent faster or slower for all its life, so that each fresh pair tells something
else. And one engine has its offload attached and detached (`offload_turns.py`), in many short rounds: that tells percents apart. What
counts is the ratio of neighbouring rounds with the interval that chance leaves; the same of two rounds of one side says how well the
run can tell. A part of `bench_offload.py`; by itself it prints its figures and writes nothing, in about seven minutes.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from benchmarks.paired import ORDER, Estimate, Pair, by_round, by_step, like_pairs, rounds_of, unlike_pairs
from benchmarks.report import Table
from examples.serving import offload_flags

NAMES = ("off", "eager")
Rounds = list[list[float]]
"""Seconds of the steps of each round, in order."""
FIGURES = ("tokens/s", "tokens/s, step by step", "processor ms/token")


@dataclass(frozen=True)
class Load:
    """Sizes: `pairs` of servers, `rounds` of each (an even number), after rounds that fill both pools; what is asked in a round.

    One engine: rounds that are shorter, for so many seconds or groups of four rounds.
    """

    pairs: int = 2
    rounds: int = 10
    requests: int = 8
    prompt: int = 144
    output: int = 16
    block_tokens: int = 16
    turn_prompt: int = 64
    turn_output: int = 8
    turn_seconds: float = 280.0
    turn_quads: int = 1000

    @property
    def tokens(self) -> int:
        """Tokens of a round of the servers."""
        return self.requests * (self.prompt + self.output)

    @property
    def turn_tokens(self) -> int:
        """Tokens of a round of the one engine."""
        return self.requests * (self.turn_prompt + self.turn_output)

    @property
    def pool_blocks(self) -> int:
        """Blocks of the device's pool and of the CPU pool: room for what runs at once and half as much again."""
        return self.requests * (-(-(self.prompt + self.output) // self.block_tokens) + 1) * 3 // 2

    def filling_rounds(self, tokens: int) -> int:
        """Rounds after which every slot of the CPU pool has been written; from then on each stored block evicts one."""
        return 1 + self.pool_blocks * self.block_tokens // tokens


QUICK = Load(1, 2, requests=4, prompt=40, output=4, turn_prompt=40, turn_output=4, turn_quads=2)


def throughput(model: Model, load: Load) -> dict[str, Any]:
    """The ratios of both measurements, and what they come from."""
    chance = random.Random(23)
    wall: list[Rounds] = []
    cpu: list[Rounds] = []
    rounds = 2 * (load.filling_rounds(load.tokens) + load.rounds)
    with tqdm(total=load.pairs * rounds, desc=f"throughput, {model.name}", unit="round") as bar:
        for _ in range(load.pairs):
            of_pair = _pair(model, load, chance, bar)
            wall.append([[seconds] for seconds, _ in of_pair])
            cpu.append([[seconds] for _, seconds in of_pair])
    figures = (_speed(wall, load.tokens), _processor(cpu, load.tokens))
    return {
        "model": model.name,
        "pairs": load.pairs,
        "rounds": load.rounds,
        "pool_blocks": load.pool_blocks,
        "median_by_pair": [
            statistics.median(sum(off) / sum(eager) for off, eager in unlike_pairs(rounds)) for rounds in wall
        ],
        "figures": dict(zip(("tokens/s", "processor ms/token"), figures, strict=True)),
        "one_engine": in_turns(model, load),
    }


def in_turns(model: Model, load: Load) -> dict[str, Any]:
    """The same figures of one engine, in a process of its own; blocks and bytes stored in a round."""
    script = Path(__file__).with_name("offload_turns.py")
    with tempfile.TemporaryDirectory(prefix="bench-offload-") as folder:
        out = Path(folder) / "turns.json"
        sizes = {
            "quads": load.turn_quads,
            "seconds": load.turn_seconds,
            "filling-rounds": load.filling_rounds(load.turn_tokens),
            "requests": load.requests,
            "prompt": load.turn_prompt,
            "output": load.turn_output,
            "pool-blocks": load.pool_blocks,
            "vocabulary": model.vocabulary,
            "max-model-len": max_model_len(model),
        }
        options = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
        command = [sys.executable, str(script), "--model", str(model.folder), "--out", str(out), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        told: dict[str, Any] = json.loads(out.read_text())
    wall, cpu = [told.pop("steps_s")], [[[seconds] for seconds in told.pop("cpu_s")]]
    speed = _speed(wall, load.turn_tokens)
    figures = (speed, speed | _compare(wall, by_step), _processor(cpu, load.turn_tokens))
    return told | {"rounds": len(wall[0]), "figures": dict(zip(FIGURES, figures, strict=True))}


def _compare(runs: list[Rounds], estimate: Callable[[Sequence[Pair]], Estimate]) -> dict[str, Any]:
    """Time without / time with, and the same of rounds that are alike."""
    return {
        "eager_to_off": estimate([pair for rounds in runs for pair in unlike_pairs(rounds)]).as_dict(),
        "alike": estimate([pair for rounds in runs for pair in like_pairs(rounds)]).as_dict(),
    }


def _medians(runs: list[Rounds]) -> dict[str, float]:
    return {
        name: statistics.median(sum(times) for rounds in runs for times in rounds_of(rounds, name))
        for name in NAMES
    }


def _speed(runs: list[Rounds], tokens: int) -> dict[str, Any]:
    return {name: tokens / seconds for name, seconds in _medians(runs).items()} | _compare(runs, by_round)


def _processor(runs: list[Rounds], tokens: int) -> dict[str, Any]:
    """Of processor time more is worse: the ratio is turned round."""
    inverse: list[Rounds] = [[[1 / sum(times)] for times in rounds] for rounds in runs]
    spent = {name: seconds / tokens * 1e3 for name, seconds in _medians(runs).items()}
    return spent | _compare(inverse, by_round)


def _pair(model: Model, load: Load, chance: random.Random, bar: Any) -> list[tuple[float, float]]:
    """Two fresh servers in turns: wall and processor seconds of their rounds, in order."""
    size = ("--num-gpu-blocks-override", str(load.pool_blocks), "--max-num-seqs", str(load.requests))
    flags = {"off": [], "eager": offload_flags(1 << 40, num_cpu_blocks=load.pool_blocks)}
    spent = []
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(NAMES)) as starters:
            started = {
                name: starters.submit(
                    lambda own: stack.enter_context(engine(model, *size, *own)), flags[name]
                )
                for name in NAMES
            }
            servers = {name: future.result() for name, future in started.items()}
        filling = load.filling_rounds(load.tokens)
        for number in range(-2 * filling, 2 * load.rounds):
            seconds = _round(servers[ORDER[number % len(ORDER)]], model, load, chance)
            if number >= 0:
                spent.append(seconds)
            bar.update()
    return spent


def _round(server: Engine, model: Model, load: Load, chance: random.Random) -> tuple[float, float]:
    """(seconds until the last answer, processor seconds, those of copies that end after the answers included)."""
    prompts = [random_ids(chance, model, load.prompt) for _ in range(load.requests)]
    used, started = server.cpu_seconds(), time.perf_counter()
    asyncio.run(_busy(server, prompts, load))
    wall = time.perf_counter() - started
    server.settle()
    return wall, server.cpu_seconds() - used


async def _busy(server: Engine, prompts: list[list[int]], load: Load) -> None:
    limits = httpx.Limits(max_connections=load.requests)
    async with httpx.AsyncClient(
        base_url=server.server.url, timeout=600, limits=limits, trust_env=False
    ) as client:

        async def one(prompt: list[int]) -> None:
            reply = await client.post("/v1/completions", json=completion(prompt, load.output))
            reply.raise_for_status()
            details = reply.json()["usage"].get("prompt_tokens_details") or {}
            assert not details.get("cached_tokens"), "a prompt that was never sent hit"

        await asyncio.gather(*(one(prompt) for prompt in prompts))


def sides(result: dict[str, Any]) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Both measurements by name."""
    return ("two servers", result), ("one engine", result["one_engine"])


def throughput_table(result: dict[str, Any]) -> Table:
    """The figures as a table."""
    one = result["one_engine"]
    text = (
        f"{result['model']}, 8 requests at once, every prompt sent once: all cost, no use, nothing else running. The CPU pool was "
        "written once before, so that every stored block evicts one. The ratio compares neighbouring rounds, in brackets where 95 of "
        "100 repetitions would find it (bootstrap over the pairs, a tenth of them left out at either end); the last column is the same of "
        f"neighbours that are alike: it should hold 1. {result['pairs']} fresh pairs of servers, {result['rounds']} rounds each; medians "
        f"of the single pairs of servers: {', '.join(f'{ratio:.3f}' for ratio in result['median_by_pair'])}; how these differ is not in "
        "the interval. One engine: one process "
        f"without a front end, {one['rounds']} rounds, every other two with its offload detached; a round with it stores "
        f"{one['bytes_per_round'] / 1e6:.1f} MB. Step by step: each step beside the same step of the other round."
    )
    body = []
    for where, measured in sides(result):
        for figure, row in measured["figures"].items():
            digits = 3 if figure.startswith("processor") else 1
            values = [f"{row[name]:.{digits}f}" for name in NAMES]
            body.append([f"{figure}, {where}", *values, _told(row["eager_to_off"]), _told(row["alike"])])
    columns = ("figure", *NAMES, "eager / off", "alike / alike")
    return Table("What offload costs without any hit", text, columns, body)


def _told(estimate: dict[str, Any]) -> str:
    return (
        f"{estimate['ratio']:.4f} [{estimate['low']:.4f}, {estimate['high']:.4f}], {estimate['pairs']} pairs"
    )


def even(rounds: int) -> int:
    """As many rounds of a server, or one more."""
    return rounds + rounds % 2


def main(arguments: list[str] | None = None) -> int:
    """Command line: this part alone, printed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and a few rounds: no meaning")
    parser.add_argument("--pairs", type=int, help="of fresh servers")
    parser.add_argument("--rounds", type=int, help="of each server")
    parser.add_argument("--seconds", type=float, help="for the rounds of the one engine")
    args = parser.parse_args(arguments)
    default = QUICK if args.quick else Load()
    load = replace(
        default,
        pairs=args.pairs or default.pairs,
        rounds=even(args.rounds or default.rounds),
        turn_seconds=args.seconds or default.turn_seconds,
    )
    watch = LoadWatch()
    with tempfile.TemporaryDirectory(prefix="bench-offload-") as folder:
        table = throughput_table(throughput(dense_model(args.quick, Path(folder)), load))
    print(table.text, "", *(" | ".join(row) for row in (table.columns, *table.rows)), sep="\n")
    print(f"{watch.report()['cores_used_by_others']:.2f} cores were taken by other programs.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
