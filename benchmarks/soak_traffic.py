"""What the soak run does with one server: sends cases, disturbs it, checks it when it is quiet, and ends it.

Owns the judgement of answers. It must not know which lives there are, nor how many servers each has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import psutil

from benchmarks.soak_cases import Answer, Case, answer_of
from benchmarks.soak_report import Tally
from benchmarks.soak_server import Process, Stream, check_metrics, check_stats, is_quiet, read_metrics
from examples.kv_events import CacheIndex, rebuild

READY_TIMEOUT_S = 300.0
REPLY_TIMEOUT_S = 120.0
QUIET_TIMEOUT_S = 60.0
LOG_WORDS = ("Traceback", "AssertionError", "leak")
END_TIMEOUT_S = 30.0
KILLS = ("kill server", "kill core")
EXIT_STATUS = {"kill server": -9, "kill core": 1}
RESET_FLAGS = ("reset_external", "reset_running_requests")


class Traffic:
    """Random requests and disturbances; what is wrong goes to the tally."""

    def __init__(self, chance: random.Random, tally: Tally, concurrency: int) -> None:
        self.chance, self.tally, self.concurrency = chance, tally, concurrency
        self.cases: list[Case] = []
        self.block = 0
        self.is_shared = False  # the host pool, with other engines
        self.dying: set[str] = set()  # servers that are being killed: what they answer says nothing

    def _is_dying(self, client: httpx.AsyncClient) -> bool:
        return str(client.base_url).rstrip("/") in self.dying

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
            got = await (self.whole(client, body) if how == "whole" else self._stream(client, body, how))
        except httpx.TimeoutException:
            self.tally.fault(f"no answer within {REPLY_TIMEOUT_S:.0f} s: {_short(body)}")
            return
        except (httpx.TransportError, ValueError) as error:
            if not self._is_dying(client):
                self.tally.fault(f"connection broke: {error!r}")
            return
        self.tally.counts["requests"] += 1
        self.tally.counts["left early"] += how == "leave"
        if not self._is_dying(client):
            self.judge(case, got, salted, body)

    def judge(self, case: Case, got: Answer, salted: bool, body: dict[str, Any]) -> None:
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

    async def whole(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
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
        if not self._is_dying(client):
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
            # Another engine may have stored something in a pool that it shares by the time that all have answered.
            if tier["asked"] and tier["blocks_cached"] and not (self.is_shared and tier["tier"] == "host"):
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

    # --- the server ------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def client(self, process: Process) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=process.url, timeout=REPLY_TIMEOUT_S, limits=limits, trust_env=False
        ) as made:
            yield made

    async def ready(self, process: Process, client: httpx.AsyncClient) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and process.popen.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/health", timeout=2.0)).status_code == 200:
                    return
            await asyncio.sleep(0.2)
        raise RuntimeError("the server did not start:\n" + process.log.read_text(errors="replace")[-600:])

    async def quiet_stats(self, client: httpx.AsyncClient) -> dict[str, Any]:
        """`/kv_cache/stats` when nothing runs any more, or after a while what still does."""
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        while True:
            stats: dict[str, Any] = (await client.get("/kv_cache/stats")).json()
            if is_quiet(stats) or time.monotonic() > deadline:
                return stats
            await asyncio.sleep(0.2)

    async def check_quiet(self, process: Process, client: httpx.AsyncClient, streams: list[Stream]) -> None:
        """With no request left: figures add up, no block is held, events and caches say the same."""
        stats = await self.quiet_stats(client)
        metrics = read_metrics((await client.get("/metrics")).text)
        for fault in check_stats(stats) + check_metrics(metrics, stats["tiers"]):
            self.tally.fault(fault)
        self.tally.counts["quiet checks"] += 1
        reply = await client.post("/reset_prefix_cache", params={"reset_external": "true"})
        if not reply.json()["success"]:
            self.tally.fault(f"blocks are held though nothing runs: {reply.text}")
        await asyncio.sleep(0.5)
        for stream in streams:
            index: CacheIndex = rebuild(stream.batches())
            for error in index.errors[:5]:
                self.tally.fault(f"events: {error}")
            if index.resident:
                self.tally.fault(f"events: {len(index.resident)} blocks resident after a full reset")
        log = process.log.read_text(errors="replace")
        for line in [line for line in log.splitlines() if any(word in line for word in LOG_WORDS)][:3]:
            self.tally.fault(f"server log: {line[:200]}")

    async def end(self, process: Process, end: str) -> None:
        """SIGTERM, or SIGKILL of the front end or the core, alone or under load; nothing may stay behind.

        After a SIGTERM every request still gets a whole reply.
        """
        family = process.family()
        if end.startswith("kill"):
            self.dying.add(process.url)
        async with self.client(process) as client:
            count = 0 if end == "SIGTERM" else self.concurrency
            under_load = [asyncio.create_task(self.send(client)) for _ in range(count)]
            await asyncio.sleep(1.0 if under_load else 0.0)
            target = family[-1] if end == "kill core" and len(family) > 1 else family[0]
            target.send_signal(signal.SIGKILL if end.startswith("kill") else signal.SIGTERM)
            self.tally.counts[f"ends: {end}"] += 1
            await asyncio.gather(*under_load)
        # Whoever waits for a child takes its exit status away from others.
        try:
            status = await asyncio.to_thread(process.popen.wait, END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = None
        _, alive = await asyncio.to_thread(psutil.wait_procs, family[1:], END_TIMEOUT_S)
        for left in alive:
            self.tally.fault(f"{end}: process {left.pid} did not end: {left.cmdline()[:4]}")
        if status != EXIT_STATUS.get(end, 0):
            self.tally.fault(f"{end}: exit status {status}")
        if left_over := process.left_over():
            self.tally.fault(f"{end}: left-over files {left_over[:5]}")


def _short(body: dict[str, Any]) -> str:
    shown = {key: value for key, value in body.items() if key not in ("prompt", "model", "return_token_ids")}
    return f"{len(body['prompt'])} tokens, {shown}"
