"""Soak run: random traffic, aborts, resets, pauses and kills against a real server; every answer against its solo answer.

The server is the hybrid with a scratch group in pools too small for the load, so that preemption, eviction, hits on every
tier and resets happen all the time. Lives of the server follow each other with random knobs (pools, steps, eager or lazy,
tier); a life with a kept disk is ended, mostly with `kill -9`, and started again: it must find its blocks and answer as
before. When it is idle nothing may be held. The first life is the longest and tells whether memory grows.

`python benchmarks/soak.py --minutes 30` prints a verdict; exit status 0 when nothing was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import RESULTS, machine, today
from benchmarks.soak_cases import Answer, Case, answer_of, learn, make_cases
from benchmarks.soak_report import Life, Tally, finish
from benchmarks.soak_server import (
    KEPT,
    TIERS,
    Knobs,
    Process,
    check_metrics,
    check_stats,
    is_quiet,
    read_metrics,
)
from examples.kv_events import CacheIndex, Subscriber, rebuild, replay
from scripts.demo_model import resolve_model

Batches = list[tuple[int, list[Any]]]

READY_TIMEOUT_S = 300.0
REPLY_TIMEOUT_S = 120.0
QUIET_TIMEOUT_S = 60.0
LOG_WORDS = ("Traceback", "AssertionError", "leak")
KILLS = ("kill server", "kill core")
ENDS = ("SIGTERM", "kill server", "SIGTERM under load", "kill core")
RESET_FLAGS = ("reset_external", "reset_running_requests")
# Slots that a kill may have left half written.
TORN_SLOTS_MAX = 8


class Soak:
    """The run: workers send cases, one task disturbs them, lives of the server follow each other."""

    def __init__(self, model: Path, args: argparse.Namespace, folder: Path) -> None:
        self.model, self.args, self.folder = model, args, folder
        self.tally = Tally()
        self.chance = random.Random(args.seed)
        self.cases: list[Case] = []
        self.kept: list[Case] = []  # what the last life sent to its kept disk before it ended
        self.started = time.monotonic()
        self.block = 0
        self.dying = False
        self.end = 0.0  # of all traffic; known when the solo answers are

    # --- one request --------------------------------------------------------------------------------------------

    async def send(self, client: httpx.AsyncClient) -> None:
        """One random case, whole or as a stream, perhaps left early; checks the answer."""
        case = self.chance.choice(self.cases)
        body = case.body | {"priority": self.chance.randrange(3)}
        salted = self.chance.random() < 0.1
        if salted:
            body["cache_salt"] = f"salt-{self.chance.random()}"
        how = self.chance.choices(["whole", "stream", "leave"], [4, 4, 2])[0]
        if how != "whole" and "prompt_logprobs" in body:
            how = "whole"
        try:
            got = await (self._whole(client, body) if how == "whole" else self._stream(client, body, how))
        except httpx.TimeoutException:
            self.tally.fault(f"no answer within {REPLY_TIMEOUT_S:.0f} s: {_short(body)}")
            return
        except (httpx.TransportError, ValueError) as error:
            if not self.dying:
                self.tally.fault(f"connection broke: {error!r}")
            return
        self.tally.counts["requests"] += 1
        self.tally.counts["left early"] += how == "leave"
        if not self.dying:
            self._judge(case, got, salted, body)

    def _judge(self, case: Case, got: Answer, salted: bool, body: dict[str, Any]) -> None:
        if got.status != 200:
            self.tally.fault(f"HTTP {got.status} {got.message} for {_short(body)}")
            return
        self.tally.counts["aborted"] += got.finish_reason == "abort"
        self.tally.counts["cached tokens"] += got.cached_tokens
        wrong = case.difference(got)
        if wrong is not None:
            self.tally.counts["wrong outputs"] += 1
            self.tally.fault(f"wrong output, {got.cached_tokens} cached: {wrong}: {_short(body)}")
        most = (len(body["prompt"]) - 1) // self.block * self.block
        if salted:
            most = 0
        if got.prompt_tokens and not (0 <= got.cached_tokens <= most and got.cached_tokens % self.block == 0):
            self.tally.fault(f"cached_tokens {got.cached_tokens}, at most {most} possible: {_short(body)}")

    async def _whole(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
        reply = await client.post("/v1/completions", json=body)
        if reply.status_code != 200:
            return Answer(status=reply.status_code, message=reply.text[:200])
        return answer_of(reply.json())

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any], how: str) -> Answer:
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        chunks_left = self.chance.randrange(1, 12) if how == "leave" else 1 << 30
        answer = Answer()
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                return Answer(status=reply.status_code, message=(await reply.aread()).decode()[:200])
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    return answer
                if line.startswith("data: "):
                    self._take(answer, json.loads(line.removeprefix("data: ")))
                    chunks_left -= 1
                if chunks_left == 0:
                    answer.finish_reason = "abort"
                    return answer
        if not self.dying:
            self.tally.fault("a stream ended without [DONE]")
        return answer

    def _take(self, answer: Answer, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            answer.status, answer.message = 500, str(chunk["error"])
            return
        for choice in chunk["choices"]:
            answer.token_ids = [*answer.token_ids, *(choice.get("token_ids") or [])]
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        usage = chunk.get("usage")
        if usage:
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    # --- disturbance --------------------------------------------------------------------------------------------

    async def disturb(self, client: httpx.AsyncClient) -> None:
        """One reset, pause or abort that a server must take at any time."""
        what = self.chance.choices(["reset", "pause", "abort unknown", "look"], [6, 2, 1, 2])[0]
        if what == "reset":
            await self._reset(client)
        elif what == "pause":
            await self._pause(client)
        elif what == "abort unknown":
            await client.post("/abort_requests", json={"request_ids": ["cmpl-nobody"]})
        else:
            for path in ("/metrics", "/server_info?config_format=json", "/v1/models"):
                await client.get(path)

    async def _reset(self, client: httpx.AsyncClient) -> None:
        """Of the device, of all tiers or, in half of the cases, of some tiers alone."""
        params: dict[str, Any] = {name: str(self.chance.random() < 0.5).lower() for name in RESET_FLAGS}
        if self.chance.random() < 0.5:
            told = (await client.get("/kv_cache/stats")).json()["tiers"]
            names = [tier["tier"] for tier in told]
            params["tiers"] = self.chance.sample(names, self.chance.randint(1, len(names)))
        reply = await client.post("/reset_prefix_cache", params=params)
        self.tally.counts["resets"] += 1
        if reply.status_code != 200:
            self.tally.fault(f"reset {params}: HTTP {reply.status_code} {reply.text[:200]}")
            return
        for tier in reply.json().get("tiers", ()):
            if tier["asked"] and tier["blocks_cached"]:
                self.tally.fault(f"reset {params}: findable still: {tier}")

    async def _pause(self, client: httpx.AsyncClient) -> None:
        mode = self.chance.choice(["keep", "wait", "abort"])
        clear = str(self.chance.random() < 0.5).lower()
        reply = await client.post("/pause", params={"mode": mode, "clear_cache": clear})
        await asyncio.sleep(self.chance.random() * 0.5)
        again = await client.post("/resume")
        self.tally.counts["pauses"] += 1
        if (reply.status_code, again.status_code) != (200, 200):
            self.tally.fault(f"pause {mode}: HTTP {reply.status_code}, resume: HTTP {again.status_code}")

    # --- one life -----------------------------------------------------------------------------------------------

    async def life(self, number: int, knobs: Knobs, end: str, share: float, disk: Path, fill: bool) -> None:
        """One start of the server, traffic for a while, checks when it is quiet, and its end.

        `share` is the part of the whole run that the traffic lasts; `fill` leaves something for the next life to find.
        """
        tqdm.write(f"life {number}: {knobs}; ends with {end}")
        self.tally.lives.append(Life(str(knobs), end))
        flags = [*knobs.flags(disk), *self.args.server_flag]
        process = Process.start(self.model, flags, self.folder / f"life-{number}")
        stream: Subscriber | None = None
        try:
            async with self._client(process) as client:
                await self._ready(process, client)
                # The ring for replays is short: what it has now is everything so far, the rest comes live.
                stream = Subscriber(process.events)
                await asyncio.sleep(0.5)  # a subscriber joins in the background
                first = await asyncio.to_thread(replay, process.replay)
                if self.kept:
                    await self._find_again(client, knobs)
                if not self.cases:
                    await self._learn(client)
                now = time.monotonic()
                self.end = self.end or now + self.args.minutes * 60
                await self._traffic(process, client, min(self.end, now + share * self.args.minutes * 60))
                await self._check_quiet(process, client, (first, stream))
                if fill:
                    await self._fill(client)
                self.dying = end.startswith("kill")
                await self._end(process, end)
                if knobs.tier != KEPT and not end.startswith("kill"):
                    for left in sorted(disk.parent.glob(f"{disk.name}*")):
                        self.tally.fault(f"{end}: the file {left.name} stayed")
        finally:
            self.dying = False
            if stream is not None:
                stream.close()
            for left_process in process.family():
                with contextlib.suppress(psutil.NoSuchProcess):
                    left_process.kill()
            process.popen.wait()

    async def _fill(self, client: httpx.AsyncClient) -> None:
        """Leaves answers of known cases on the kept disk."""
        self.kept = self.chance.sample(self.cases, min(12, len(self.cases)))
        for case in self.kept:
            self._judge(case, await self._whole(client, case.body), False, case.body)
        await self._quiet_stats(client)

    async def _find_again(self, client: httpx.AsyncClient, knobs: Knobs) -> None:
        """After a restart: the answers are the same, and in eager mode the blocks of the life before are found.

        What lazy mode has copied by then may be nothing, or ends of prompts whose beginnings are missing.
        """
        kept, self.kept = self.kept, []
        stats = (await client.get("/kv_cache/stats")).json()
        blocks = sum(pool["blocks_cached"] for pool in stats["pools"] if pool["tier"] == "disk")
        if not (blocks or knobs.lazy):
            self.tally.fault("a restart found nothing on its kept disk")
        hits = 0
        for case in kept:
            got = await self._whole(client, case.body)
            hits += got.cached_tokens
            self._judge(case, got, False, case.body)
        metrics = read_metrics((await client.get("/metrics")).text)
        torn = metrics.get("vllm:simple_kv_offload_disk_faults_total", 0.0)
        if not (hits or knobs.lazy):
            self.tally.fault(f"a restart hit nothing of {blocks} blocks on its kept disk")
        if torn > TORN_SLOTS_MAX:
            self.tally.fault(f"{torn:.0f} bad slots on the kept disk after a restart")
        self.tally.counts["restarts with a kept disk"] += 1
        self.tally.counts["tokens found after a restart"] += hits

    @contextlib.asynccontextmanager
    async def _client(self, process: Process) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=process.url, timeout=REPLY_TIMEOUT_S, limits=limits, trust_env=False
        ) as made:
            yield made

    async def _ready(self, process: Process, client: httpx.AsyncClient) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and process.popen.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/health", timeout=2.0)).status_code == 200:
                    return
            await asyncio.sleep(0.2)
        raise RuntimeError("the server did not start:\n" + process.log.read_text(errors="replace")[-600:])

    async def _learn(self, client: httpx.AsyncClient) -> None:
        info = (await client.get("/server_info", params={"config_format": "json"})).json()
        self.block = int(info["vllm_config"]["cache_config"]["cache_hit_alignment_tokens"])
        self.cases = make_cases(self.args.cases, "m", min(self.block, 64), self.args.seed)
        for case in tqdm(self.cases, desc="solo answers", unit="case"):
            await learn(client, case)

    async def _traffic(self, process: Process, client: httpx.AsyncClient, until: float) -> None:
        start = time.monotonic()
        samples = self.tally.lives[-1].samples

        async def repeat(action: Callable[[httpx.AsyncClient], Awaitable[None]], pause_s: float) -> None:
            while time.monotonic() < until and process.popen.poll() is None:
                await action(client)
                await asyncio.sleep(pause_s * self.chance.random())

        async def watch() -> None:
            with tqdm(total=round(until - start), desc="soak", unit="s") as bar:
                while time.monotonic() < until and process.popen.poll() is None:
                    await asyncio.sleep(1)
                    bar.n = round(time.monotonic() - start)
                    bar.set_postfix(self.tally.counts, refresh=True)
                    samples.append((time.monotonic() - self.started, *process.rss_mib()))

        workers = [repeat(self.send, 0.1) for _ in range(self.args.concurrency)]
        await asyncio.gather(*workers, repeat(self._guarded_disturb, 3.0), watch())
        if process.popen.poll() is not None:
            self.tally.fault(f"the server ended by itself with status {process.popen.returncode}")

    async def _guarded_disturb(self, client: httpx.AsyncClient) -> None:
        try:
            await self.disturb(client)
        except httpx.TransportError as error:
            self.tally.fault(f"a control request broke: {error!r}")

    # --- checks -------------------------------------------------------------------------------------------------

    async def _quiet_stats(self, client: httpx.AsyncClient) -> dict[str, Any]:
        """`/kv_cache/stats` when nothing runs any more, or after a while what still does."""
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        while True:
            stats: dict[str, Any] = (await client.get("/kv_cache/stats")).json()
            if is_quiet(stats) or time.monotonic() > deadline:
                return stats
            await asyncio.sleep(0.2)

    async def _check_quiet(
        self, process: Process, client: httpx.AsyncClient, events: tuple[Batches, Subscriber]
    ) -> None:
        """With no request left: figures add up, no block is held, events and caches say the same."""
        stats = await self._quiet_stats(client)
        metrics = read_metrics((await client.get("/metrics")).text)
        for fault in check_stats(stats) + check_metrics(metrics, stats["tiers"]):
            self.tally.fault(fault)
        self.tally.counts["quiet checks"] += 1
        reply = await client.post("/reset_prefix_cache", params={"reset_external": "true"})
        if not reply.json()["success"]:
            self.tally.fault(f"blocks are held though nothing runs: {reply.text}")
        await asyncio.sleep(0.5)
        first, stream = events
        last = first[-1][0] if first else -1
        index: CacheIndex = rebuild([*first, *(batch for batch in list(stream.batches) if batch[0] > last)])
        for error in index.errors[:5]:
            self.tally.fault(f"events: {error}")
        if index.resident:
            self.tally.fault(f"events: {len(index.resident)} blocks resident after a full reset")
        log = process.log.read_text(errors="replace")
        for line in [line for line in log.splitlines() if any(word in line for word in LOG_WORDS)][:3]:
            self.tally.fault(f"server log: {line[:200]}")

    async def _end(self, process: Process, end: str) -> None:
        """SIGTERM, or SIGKILL of the front end or the core, alone or under load; nothing may stay behind.

        After a SIGTERM every request still gets a whole reply.
        """
        family = process.family()
        async with self._client(process) as client:
            count = 0 if end == "SIGTERM" else self.args.concurrency
            under_load = [asyncio.create_task(self.send(client)) for _ in range(count)]
            await asyncio.sleep(1.0 if under_load else 0.0)
            target = family[-1] if end == "kill core" and len(family) > 1 else family[0]
            target.send_signal(signal.SIGKILL if end.startswith("kill") else signal.SIGTERM)
            self.tally.counts[f"ends: {end}"] += 1
            await asyncio.gather(*under_load)
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, 30)
        for left in alive:
            self.tally.fault(f"{end}: process {left.pid} did not end: {left.cmdline()[:4]}")
        if target is family[0] and not end.startswith("kill") and process.popen.wait() != 0:
            self.tally.fault(f"{end}: exit status {process.popen.returncode}")
        if left_over := process.left_over():
            self.tally.fault(f"{end}: left-over files {left_over[:5]}")

    async def run(self) -> None:
        """Lives until the time is over, with every tier in turn; a kept disk is killed and started again with the same."""
        number = 0
        for turn in itertools.count():
            knobs = self._knobs(turn)
            disk = self.folder / f"kv-{turn}"
            for fill in (True, False) if knobs.tier == KEPT else (False,):
                end = KILLS[turn % len(KILLS)] if fill else ENDS[number % len(ENDS)]
                share = self.args.first_share if number == 0 else self.args.life_minutes / self.args.minutes
                await self.life(number, knobs, end, share, disk, fill)
                number += 1
            if time.monotonic() >= self.end:
                break
        self.tally.counts["lives"] = number

    def _knobs(self, turn: int) -> Knobs:
        args = self.args
        if turn == 0:
            return Knobs(args.tier or KEPT, args.lazy, args.gpu_blocks, args.cpu_blocks, args.batched_tokens)
        return Knobs.draw(self.chance, args.tier or TIERS[turn % len(TIERS)])


def _short(body: dict[str, Any]) -> str:
    shown = {key: value for key, value in body.items() if key not in ("prompt", "model", "return_token_ids")}
    return f"{len(body['prompt'])} tokens, {shown}"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny:glm5_next", help="folder, GGUF file or tiny:NAME")
    parser.add_argument("--minutes", type=float, default=5.0, help="of traffic, over all lives")
    parser.add_argument("--first-share", type=float, default=0.5, help="of the minutes, for the first life")
    parser.add_argument("--life-minutes", type=float, default=2.0, help="of each later life")
    parser.add_argument("--concurrency", type=int, default=10)
    parser.add_argument("--cases", type=int, default=66)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tier", choices=TIERS, help="only this one; without it all take turns")
    parser.add_argument("--gpu-blocks", type=int, default=64, help="of the first life; later ones are random")
    parser.add_argument("--cpu-blocks", type=int, default=60, help="of the first life")
    parser.add_argument("--batched-tokens", type=int, default=65, help="of the first life")
    parser.add_argument(
        "--lazy", action="store_true", help="first life: offload only what is about to be evicted"
    )
    parser.add_argument("--rss-limit", type=float, default=1.0, help="MiB per minute that memory may grow")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of soak.{json,png}")
    parser.add_argument("--server-flag", action="append", default=[], help="one more flag of vllm serve")
    return parser.parse_args()


def main() -> int:
    """Exit status 0 when nothing was wrong."""
    args = parse()
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as folder:
        soak = Soak(resolve_model(args.model), args, Path(folder))
        try:
            asyncio.run(soak.run())
        except RuntimeError as error:
            soak.tally.fault(f"the run ended early: {error}")
    about = {"date": today(), "machine": machine(), "minutes": args.minutes, "seed": args.seed}
    return 0 if finish(soak.tally, args.rss_limit, args.out, about) else 1


if __name__ == "__main__":
    sys.exit(main())
