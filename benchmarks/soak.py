"""Soak run: random traffic, aborts, resets, pauses and kills against a real server; every answer against its solo answer.

The server is the hybrid with a scratch group in pools too small for the load, so that preemption, eviction, CPU hits and
resets happen all the time. Run: `python benchmarks/soak.py --minutes 30`. Exit status 0 when nothing was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.soak_cases import Answer, Case, answer_of, learn, make_cases
from examples.kv_events import CacheIndex, rebuild, replay
from examples.serving import event_flags, free_port, offload_flags
from scripts.demo_model import resolve_model

READY_TIMEOUT_S = 300.0
REPLY_TIMEOUT_S = 120.0
QUIET_TIMEOUT_S = 60.0
LOG_WORDS = ("Traceback", "AssertionError", "leak")
ENDS = ("SIGTERM under load", "kill server", "kill core", "SIGTERM")
RESET_FLAGS = ("reset_external", "reset_running_requests")


@dataclass
class Tally:
    """What happened. `faults` is empty after a good run."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    rss_mib: list[list[tuple[float, float]]] = field(default_factory=list)  # one list per life

    def fault(self, text: str) -> None:
        """Records one thing that must not happen."""
        self.counts["faults"] += 1
        if len(self.faults) < 50:
            self.faults.append(text)
        tqdm.write(f"FAULT: {text}")


@dataclass
class Process:
    """One life of the server: its process, folder for temporary files, log and event endpoint."""

    popen: subprocess.Popen[bytes]
    folder: Path
    url: str
    log: Path
    replay: str

    @classmethod
    def start(cls, model: Path, flags: list[str], folder: Path) -> Process:
        """Starts `vllm serve` in dev mode on a free port, with temporary files below `folder`."""
        port = free_port()
        temporary = folder / "tmp"
        temporary.mkdir(parents=True)
        log, again = folder / "server.log", f"ipc://{folder}/replay"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *flags]
        command += ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", "m"]
        command += ["--enable-prompt-tokens-details", "--no-log-error-stack", "--disable-uvicorn-access-log"]
        command += event_flags(f"ipc://{folder}/events", again)
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
        environment["TMPDIR"] = str(temporary)
        with log.open("wb") as sink:
            popen = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
        return cls(popen, folder, f"http://127.0.0.1:{port}", log, again)

    def family(self) -> list[psutil.Process]:
        """The server and its living children."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.popen.pid)
            return [root, *root.children(recursive=True)]
        return []

    def rss_mib(self) -> float:
        """Resident memory of the whole family."""
        total = 0
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total / 2**20

    def left_over(self) -> list[str]:
        """Temporary files that are still there."""
        return sorted(str(path.relative_to(self.folder)) for path in (self.folder / "tmp").rglob("*"))


class Soak:
    """The run: workers send cases, one task disturbs them, lives of the server follow each other."""

    def __init__(self, model: Path, args: argparse.Namespace, folder: Path) -> None:
        self.model, self.args, self.folder = model, args, folder
        self.tally = Tally()
        self.chance = random.Random(args.seed)
        self.cases: list[Case] = []
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
            params = {name: str(self.chance.random() < 0.5).lower() for name in RESET_FLAGS}
            reply = await client.post("/reset_prefix_cache", params=params)
            self.tally.counts["resets"] += 1
            if reply.status_code != 200:
                self.tally.fault(f"reset {params}: HTTP {reply.status_code} {reply.text[:200]}")
        elif what == "pause":
            await self._pause(client)
        elif what == "abort unknown":
            await client.post("/abort_requests", json={"request_ids": ["cmpl-nobody"]})
        else:
            for path in ("/metrics", "/server_info?config_format=json", "/v1/models"):
                await client.get(path)

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

    async def life(self, number: int, end: str) -> None:
        """One start of the server, traffic for a while, checks when it is quiet, and its end."""
        process = Process.start(self.model, server_flags(self.args), self.folder / f"life-{number}")
        try:
            async with self._client(process) as client:
                await self._ready(process, client)
                if not self.cases:
                    await self._learn(client)
                now = time.monotonic()
                self.end = self.end or now + self.args.minutes * 60
                await self._traffic(process, client, min(self.end, now + self.args.life_minutes * 60))
                if not end.startswith("kill"):
                    await self._check_quiet(process, client)
                self.dying = end.startswith("kill")
                await self._end(process, end)
        finally:
            self.dying = False
            for left in process.family():
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()
            process.popen.wait()

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
        raise RuntimeError("the server did not start:\n" + process.log.read_text(errors="replace")[-3000:])

    async def _learn(self, client: httpx.AsyncClient) -> None:
        info = (await client.get("/server_info", params={"config_format": "json"})).json()
        self.block = int(info["vllm_config"]["cache_config"]["cache_hit_alignment_tokens"])
        self.cases = make_cases(self.args.cases, "m", min(self.block, 64), self.args.seed)
        for case in tqdm(self.cases, desc="solo answers", unit="case"):
            await learn(client, case)

    async def _traffic(self, process: Process, client: httpx.AsyncClient, until: float) -> None:
        start = time.monotonic()
        samples: list[tuple[float, float]] = []
        self.tally.rss_mib.append(samples)

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
                    samples.append((time.monotonic(), process.rss_mib()))

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

    async def _check_quiet(self, process: Process, client: httpx.AsyncClient) -> None:
        """With no request left: figures add up, no block is held, events and caches say the same."""
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        while time.monotonic() < deadline:
            metrics = read_metrics((await client.get("/metrics")).text)
            if is_quiet(metrics):
                break
            await asyncio.sleep(0.5)
        for fault in check_metrics(metrics):
            self.tally.fault(fault)
        reply = await client.post("/reset_prefix_cache", params={"reset_external": "true"})
        if not reply.json()["success"]:
            self.tally.fault(f"blocks are held though nothing runs: {reply.text}")
        await asyncio.sleep(0.5)
        index: CacheIndex = rebuild(await asyncio.to_thread(replay, process.replay))
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
        """Lives until the time is over, each with another end."""
        number = 0
        while not self.end or time.monotonic() < self.end:
            await self.life(number, ENDS[number % len(ENDS)])
            number += 1
        self.tally.counts["lives"] = number


def _short(body: dict[str, Any]) -> str:
    shown = {key: value for key, value in body.items() if key not in ("prompt", "model", "return_token_ids")}
    return f"{len(body['prompt'])} tokens, {shown}"


def server_flags(args: argparse.Namespace) -> list[str]:
    """Pools that hold a few requests, odd steps, the CPU or disk tier."""
    extra: dict[str, Any] = {"num_cpu_blocks": args.cpu_blocks, "lazy_offload": args.lazy}
    if args.disk:
        extra |= {"kv_offload_backend": "disk", "disk_path": args.disk, "use_page_cache": True}
    flags = [*offload_flags(1 << 30, **extra), "--dtype", "float32", "--max-model-len", "1024"]
    flags += ["--num-gpu-blocks-override", str(args.gpu_blocks), "--max-num-seqs", "8"]
    flags += ["--max-num-batched-tokens", str(args.batched_tokens), "--scheduling-policy", "priority"]
    return [*flags, *args.server_flag]


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus samples, summed over labels, by name."""
    sums: Counter[str] = Counter()
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            sums[name.split("{")[0]] += float(value)  # type: ignore[assignment]
    return dict(sums)


def is_quiet(metrics: dict[str, float]) -> bool:
    """No request and no copy is under way."""
    names = ("num_requests_running", "num_requests_waiting", "simple_kv_offload_pending_store_blocks")
    return not any(metrics.get(f"vllm:{name}", 0) for name in names)


def check_metrics(metrics: dict[str, float]) -> list[str]:
    """What does not add up on a quiet server."""
    faults = [] if is_quiet(metrics) else ["metrics: requests or copies never end"]
    usage = metrics["vllm:kv_cache_usage_perc"]
    if usage != 0:
        faults.append(f"metrics: KV usage {usage} with no request")
    prompt = metrics["vllm:prompt_tokens_total"]
    for name in ("vllm:prompt_tokens_by_source_total", "vllm:request_prompt_tokens_sum"):
        if name in metrics and name.endswith("source_total") and metrics[name] != prompt:
            faults.append(f"metrics: {name} {metrics[name]}, prompt tokens {prompt}")
    for tier in ("prefix_cache", "external_prefix_cache"):
        hits, queries = metrics[f"vllm:{tier}_hits_total"], metrics[f"vllm:{tier}_queries_total"]
        if hits > queries:
            faults.append(f"metrics: {tier} hits {hits} of {queries}")
    cached = metrics.get("vllm:prompt_tokens_cached_total", 0.0)
    if cached > prompt:
        faults.append(f"metrics: {cached} cached of {prompt} prompt tokens")
    return faults


def rss_drift(lives: list[list[tuple[float, float]]]) -> float:
    """MiB per minute between the second quarter and the last one of the longest life."""
    samples = max(lives, key=len, default=[])
    if len(samples) < 40:
        return 0.0
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    mean = [sum(value for _, value in part) / len(part) for part in (early, late)]
    minutes = (late[len(late) // 2][0] - early[len(early) // 2][0]) / 60
    return (mean[1] - mean[0]) / minutes


def print_summary(tally: Tally, drift: float) -> None:
    """The figures and every recorded fault."""
    print("\nsoak run")
    for name in sorted(tally.counts):
        print(f"  {name:16s} {tally.counts[name]:8d}")
    print(f"  {'RSS drift':16s} {drift:8.2f} MiB/min")
    print("faults: none" if not tally.faults else "faults:")
    for fault in tally.faults:
        print(f"  {fault}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny:glm5_next", help="folder, GGUF file or tiny:NAME")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument(
        "--life-minutes", type=float, default=5.0, help="until the server is ended and restarted"
    )
    parser.add_argument("--concurrency", type=int, default=10)
    parser.add_argument("--cases", type=int, default=66)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu-blocks", type=int, default=64)
    parser.add_argument("--cpu-blocks", type=int, default=60)
    parser.add_argument("--batched-tokens", type=int, default=65)
    parser.add_argument("--lazy", action="store_true", help="offload only what is about to be evicted")
    parser.add_argument("--disk", metavar="PATH", help="keep the copies in a file instead of memory")
    parser.add_argument("--server-flag", action="append", default=[], help="one more flag of vllm serve")
    return parser.parse_args()


def main() -> int:
    """Exit status 0 when nothing was wrong."""
    args = parse()
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as folder:
        soak = Soak(resolve_model(args.model), args, Path(folder))
        asyncio.run(soak.run())
    print_summary(soak.tally, rss_drift(soak.tally.rss_mib))
    return 1 if soak.tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
