"""The server of the soak run: its knobs, its process, and what its counters must say when nothing runs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from examples.kv_events import Subscriber, replay
from examples.serving import event_flags, free_port, offload_flags

Batches = list[tuple[int, list[Any]]]

KEPT = "kept disk"
SHARED = "shared pool"
"""Two servers on one pool."""
REPLICAS = "replicas"
"""Two engines behind one server, on one pool."""
TIERS = (KEPT, SHARED, REPLICAS, "disk backend", "host", "disk tier")
SHARED_MEMORY = Path("/dev/shm")
DISK_CAPACITY_BYTES = 64 << 20
# The publisher's ring for replays is full soon, so that its growth is over before memory is judged.
EVENT_BATCHES = 500
FLAGS = ((), ("--no-async-scheduling",), ("--stream-interval", "3"), ("--long-prefill-token-threshold", "40"))
POLICIES: tuple[dict[str, Any], ...] = ({}, {"eviction_policy": "arc"}, {"store_threshold": 2})
ENGINES = {REPLICAS: 2}


@dataclass(frozen=True)
class Knobs:
    """What differs from life to life. Pools hold a few requests, steps are odd."""

    tier: str = "host"
    lazy: bool = False
    gpu_blocks: int = 64
    cpu_blocks: int = 60
    batched_tokens: int = 65
    max_seqs: int = 8
    more: tuple[str, ...] = ()
    policy: str = "{}"

    @classmethod
    def draw(cls, chance: random.Random, tier: str) -> Knobs:
        """Random knobs around one tier."""
        return cls(
            tier,
            chance.random() < 0.5,
            chance.choice([40, 48, 64, 96]),
            chance.choice([24, 60, 120]),
            chance.choice([33, 65, 128, 300]),
            chance.choice([2, 8, 16]),
            chance.choice(FLAGS),
            json.dumps(chance.choice([policy for policy in POLICIES if _goes_with(policy, tier)])),
        )

    @property
    def engines(self) -> int:
        """Of one server."""
        return ENGINES.get(self.tier, 1)

    def flags(self, disk: Path) -> list[str]:
        """Flags of `vllm serve`; files of the disk tiers start with `disk`."""
        extra: dict[str, Any] = {"num_cpu_blocks": self.cpu_blocks, "lazy_offload": self.lazy}
        extra |= json.loads(self.policy)
        if self.tier in (SHARED, REPLICAS):
            extra["shared_pool"] = pool_name(disk)
        elif self.tier != "host":
            extra |= {
                "disk_path": str(disk),
                "disk_capacity_bytes": DISK_CAPACITY_BYTES,
                "use_page_cache": True,
            }
        extra |= {
            "host": {},
            SHARED: {},
            REPLICAS: {},
            "disk backend": {"kv_offload_backend": "disk"},
            "disk tier": {"disk_tier": True},
            # Read however slow, or a restart could rightly find nothing.
            KEPT: {"disk_tier": True, "disk_persist": True, "decline_slow_tier": "off"},
        }[self.tier]
        flags = [*offload_flags(1 << 30, **extra), "--dtype", "float32", "--max-model-len", "1024"]
        flags += ["--num-gpu-blocks-override", str(self.gpu_blocks), "--max-num-seqs", str(self.max_seqs)]
        flags += ["--max-num-batched-tokens", str(self.batched_tokens), "--scheduling-policy", "priority"]
        if self.engines > 1:
            flags += ["--data-parallel-size", str(self.engines)]
        return [*flags, *self.more]

    def __str__(self) -> str:
        mode = "lazy" if self.lazy else "eager"
        pools = f"{self.gpu_blocks} device and {self.cpu_blocks} host blocks"
        steps = f"steps of {self.batched_tokens} tokens, {self.max_seqs} requests"
        return " ".join([f"{self.tier}, {mode}, {pools}, {steps}", *self.more, self.policy])


def _goes_with(policy: dict[str, Any], tier: str) -> bool:
    """What was asked for once has to be on a kept disk, and a shared pool has one order of eviction for all."""
    return not policy or (tier != KEPT and not (tier in (SHARED, REPLICAS) and "eviction_policy" in policy))


def pool_name(disk: Path) -> str:
    """The shared pool of the servers that would have their files there: no other run has it."""
    return f"soak-{os.getpid()}-{disk.name}"


def segments(pool: str) -> list[Path]:
    """The shared memory of pools whose names begin so."""
    return sorted(SHARED_MEMORY.glob(f"vllm-kv-*-{pool}*"))


class Stream:
    """All KV events of one engine since its start."""

    def __init__(self, events: str, replay_endpoint: str) -> None:
        self._live = Subscriber(events)
        self._replay_endpoint = replay_endpoint
        self._first: Batches = []

    def begin(self) -> None:
        """The ring for replays is short: what it has now is everything so far, the rest comes live."""
        self._first = replay(self._replay_endpoint)

    def batches(self) -> Batches:
        """In their order."""
        last = self._first[-1][0] if self._first else -1
        return [*self._first, *(batch for batch in list(self._live.batches) if batch[0] > last)]

    def close(self) -> None:
        """Stops reading."""
        self._live.close()


@dataclass
class Process:
    """One life of the server: its process, folder for temporary files, log and event endpoint."""

    popen: subprocess.Popen[bytes]
    folder: Path
    url: str
    log: Path
    events: str
    replay: str

    @classmethod
    def start(cls, model: Path, flags: list[str], folder: Path) -> Process:
        """Starts `vllm serve` in dev mode on a free port, with temporary files below `folder`."""
        port = free_port()
        temporary = folder / "tmp"
        temporary.mkdir(parents=True)
        log, publish, again = folder / "server.log", f"ipc://{folder}/events", f"ipc://{folder}/replay"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *flags]
        command += ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", "m"]
        command += ["--enable-prompt-tokens-details", "--no-log-error-stack", "--disable-uvicorn-access-log"]
        command += event_flags(publish, again, buffer_steps=EVENT_BATCHES)
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
        environment["VLLM_ALLOW_CROWDED_REPLICAS"] = "1"
        environment["TMPDIR"] = str(temporary)
        with log.open("wb") as sink:
            popen = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
        return cls(popen, folder, f"http://127.0.0.1:{port}", log, publish, again)

    def streams(self, engines: int) -> list[Stream]:
        """The events of each engine; its number is in its address."""
        tails = ["", *(f"_dp{number}" for number in range(1, engines))]
        return [Stream(self.events + tail, self.replay + tail) for tail in tails]

    def family(self) -> list[psutil.Process]:
        """The server and its living children."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.popen.pid)
            return [root, *root.children(recursive=True)]
        return []

    def kill(self) -> None:
        """Ends what is left of it by force."""
        for left in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        self.popen.wait()

    def rss_mib(self) -> tuple[float, float]:
        """Resident memory of the server, and of its children."""
        sizes = []
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                sizes.append(process.memory_info().rss / 2**20)
        return (sizes[0] if sizes else 0.0), sum(sizes[1:])

    def left_over(self) -> list[str]:
        """Temporary files that are still there."""
        return sorted(str(path.relative_to(self.folder)) for path in (self.folder / "tmp").rglob("*"))


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus samples, summed over labels, by name."""
    sums: Counter[str] = Counter()
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            sums[name.split("{")[0]] += float(value)  # type: ignore[assignment]
    return dict(sums)


def is_quiet(stats: dict[str, Any]) -> bool:
    """No request and no copy is under way, by `/kv_cache/stats`."""
    copies = any(transfer["blocks_in_flight"] for transfer in stats["transfers"])
    return not (copies or stats["pending_store_blocks"] or any(_live_requests(stats).values()))


def _live_requests(stats: dict[str, Any]) -> dict[str, int]:
    return {name: stats["requests"][name] for name in ("running", "waiting", "loading")}


def check_stats(stats: dict[str, Any]) -> list[str]:
    """What an idle server still holds, and sums that do not add up."""
    faults = []
    if not is_quiet(stats):
        faults.append(f"requests or copies never end: {stats['requests']}, {stats['transfers']}")
    for pool in stats["pools"]:
        if pool["blocks_held"]:
            faults.append(
                f"{pool['blocks_held']} blocks of the {pool['tier']} pool are held though nothing runs"
            )
        if pool["blocks_free"] + pool["blocks_held"] != pool["blocks_total"]:
            faults.append(f"{pool['tier']} pool: free and held do not add up: {pool}")
    for copies in stats["transfers"]:
        ends = sum(copies[f"blocks_{end}"] for end in ("in_flight", "done", "failed", "dropped"))
        if copies["blocks_scheduled"] != ends:
            faults.append(f"transfers do not add up: {copies}")
    for tier in stats["tiers"]:
        if tier["tokens_hit"] > tier["tokens_asked"]:
            faults.append(f"more hits than tokens asked: {tier}")
    return faults


def check_metrics(metrics: dict[str, float], tiers: Sequence[dict[str, Any]]) -> list[str]:
    """What does not add up on a quiet server; ``tiers`` are those of `/kv_cache/stats`."""
    faults = []
    usage = metrics["vllm:kv_cache_usage_perc"]
    if usage != 0:
        faults.append(f"metrics: KV usage {usage} with no request")
    prompt = metrics["vllm:prompt_tokens_total"]
    by_source = metrics.get("vllm:prompt_tokens_by_source_total", prompt)
    if by_source != prompt:
        faults.append(f"metrics: prompt tokens by source {by_source}, prompt tokens {prompt}")
    for tier in ("prefix_cache", "external_prefix_cache"):
        hits, queries = metrics[f"vllm:{tier}_hits_total"], metrics[f"vllm:{tier}_queries_total"]
        if hits > queries:
            faults.append(f"metrics: {tier} hits {hits} of {queries}")
    cached = metrics.get("vllm:prompt_tokens_cached_total", 0.0)
    if cached > prompt:
        faults.append(f"metrics: {cached} cached of {prompt} prompt tokens")
    by_tier = metrics.get("vllm:prompt_tokens_cached_by_source_total", 0.0)
    below = metrics.get("vllm:simple_kv_offload_tier_hit_tokens_total", 0.0)
    reported = {tier["tier"]: tier["tokens_reported"] for tier in tiers}
    if not (by_tier == cached == sum(reported.values())):
        faults.append(f"metrics: {cached} cached tokens, by tier {by_tier}, reported {reported}")
    if below != sum(tokens for tier, tokens in reported.items() if tier != "device"):
        faults.append(f"metrics: {below} hits below the device, reported {reported}")
    return faults
