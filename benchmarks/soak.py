"""Soak run: random traffic, aborts, resets, pauses and kills against a real server; every answer against its solo answer.

The server is the hybrid with a scratch group in pools too small for the load, so that preemption, eviction, hits on every
tier and resets happen all the time. Lives of the server follow each other with random knobs (pools, steps, eager or lazy,
tier); a life with a kept disk is ended, mostly with `kill -9`, and started again: it must find its blocks and answer as
before. In others two servers, or two replicas behind one, have a shared pool; of the two servers one is killed and started
again while the other serves. When a server is idle nothing may be held, and no shared memory may be left. The long lives
tell whether memory grows.

`python benchmarks/soak.py --minutes 30` prints a verdict; exit status 0 when nothing was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import RESULTS, machine, today
from benchmarks.soak_cases import Case, learn, make_cases
from benchmarks.soak_peer import Peer
from benchmarks.soak_report import Life, Tally, finish
from benchmarks.soak_server import (
    KEPT,
    REPLICAS,
    SHARED,
    TIERS,
    Knobs,
    Process,
    Stream,
    pool_name,
    read_metrics,
    segments,
)
from benchmarks.soak_traffic import KILLS, Traffic
from scripts.demo_model import resolve_model

LATER_SHARE_MAX = 1 / 15
ENDS = ("SIGTERM", "kill server", "SIGTERM under load", "kill core")
# Slots that a kill may have left half written.
TORN_SLOTS_MAX = 8


class Soak(Traffic):
    """The run: workers send cases, one task disturbs them, lives of the server follow each other."""

    def __init__(self, model: Path, args: argparse.Namespace, folder: Path) -> None:
        self.model, self.args, self.folder = model, args, folder
        super().__init__(random.Random(args.seed), Tally(), args.concurrency)
        self.kept: list[Case] = []  # what the last life sent to its kept disk before it ended
        self.started = time.monotonic()
        self.end_at = 0.0  # of all traffic; known when the solo answers are

    # --- one life -----------------------------------------------------------------------------------------------

    async def life(self, number: int, knobs: Knobs, end: str, share: float, disk: Path, fill: bool) -> None:
        """One start of the server, traffic for a while, checks when it is quiet, and its end.

        `share` is the part of the whole run that the traffic lasts; `fill` leaves something for the next life to find.
        """
        tqdm.write(f"life {number}: {knobs}; ends with {end}")
        self.tally.lives.append(Life(str(knobs), end))
        flags = [*knobs.flags(disk), *self.args.server_flag]
        process = Process.start(self.model, flags, self.folder / f"life-{number}")
        self.is_shared = knobs.tier in (SHARED, REPLICAS)
        peer: Peer | None = None
        if knobs.tier == SHARED:
            peer = Peer(self, self.model, flags, self.folder / f"life-{number}-peer")
        streams: list[Stream] = []
        try:
            async with self.client(process) as client:
                await self.ready(process, client)
                streams = process.streams(knobs.engines)
                await asyncio.sleep(0.5)  # a subscriber joins in the background
                for stream in streams:
                    await asyncio.to_thread(stream.begin)
                if self.kept:
                    await self._find_again(client, knobs)
                if not self.cases:
                    await self._learn(client)
                if peer is not None:
                    await peer.start()
                now = time.monotonic()
                self.end_at = self.end_at or now + self.args.minutes * 60
                until = min(self.end_at, now + share * self.args.minutes * 60)
                parts = [self._traffic(process, client, until)]
                await asyncio.gather(*parts, *([] if peer is None else [peer.run(until)]))
                await self.check_quiet(process, client, streams)
                if fill:
                    await self._fill(client)
                await self.end(process, end)
            if peer is not None:
                await peer.outlive()
            self._check_left_over(knobs, end, disk)
        finally:
            for stream in streams:
                stream.close()
            process.kill()
            if peer is not None:
                peer.close()

    def _check_left_over(self, knobs: Knobs, end: str, disk: Path) -> None:
        """Files of a disk that nobody keeps, and shared memory that nobody uses."""
        if knobs.tier != KEPT and not end.startswith("kill"):
            for left in sorted(disk.parent.glob(f"{disk.name}*")):
                self.tally.fault(f"{end}: the file {left.name} stayed")
        for segment in segments(pool_name(disk)):
            self.tally.fault(f"{end}: the shared pool {segment.name} stayed")
            segment.unlink()

    async def _fill(self, client: httpx.AsyncClient) -> None:
        """Leaves answers of known cases on the kept disk."""
        self.kept = self.chance.sample(self.cases, min(12, len(self.cases)))
        for case in self.kept:
            self.judge(case, await self.whole(client, case.body), False, case.body)
        await self.quiet_stats(client)

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
            got = await self.whole(client, case.body)
            hits += got.cached_tokens
            self.judge(case, got, False, case.body)
        metrics = read_metrics((await client.get("/metrics")).text)
        torn = metrics.get("vllm:simple_kv_offload_disk_faults_total", 0.0)
        if not (hits or knobs.lazy):
            self.tally.fault(f"a restart hit nothing of {blocks} blocks on its kept disk")
        if torn > TORN_SLOTS_MAX:
            self.tally.fault(f"{torn:.0f} bad slots on the kept disk after a restart")
        self.tally.counts["restarts with a kept disk"] += 1
        self.tally.counts["tokens found after a restart"] += hits

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

    async def run(self) -> None:
        """Lives until the time is over, with every tier in turn; a kept disk is killed and started again with the same."""
        number = 0
        for turn in itertools.count():
            knobs = self.knobs(turn)
            disk = self.folder / f"kv-{turn}"
            for fill in (True, False) if knobs.tier == KEPT else (False,):
                end = KILLS[turn % len(KILLS)] if fill else ENDS[number % len(ENDS)]
                share = self.share(number, knobs)
                await self.life(number, knobs, end, share, disk, fill)
                number += 1
            if time.monotonic() >= self.end_at:
                break
        self.tally.counts["lives"] = number
        for segment in segments(f"soak-{os.getpid()}-"):
            self.tally.fault(f"{segment.name} is left at the end")

    def share(self, number: int, knobs: Knobs) -> float:
        """Part of all the minutes for one life, so that each form has one."""
        if number == 0:
            return float(self.args.first_share)
        if knobs.tier == SHARED and not any(life.knobs.startswith(SHARED) for life in self.tally.lives):
            return float(self.args.shared_share)
        return min(float(self.args.life_minutes / self.args.minutes), LATER_SHARE_MAX)

    def knobs(self, turn: int) -> Knobs:
        """Of the lives of one turn: every tier has one in as many turns as there are."""
        args = self.args
        if turn == 0:
            return Knobs(args.tier or KEPT, args.lazy, args.gpu_blocks, args.cpu_blocks, args.batched_tokens)
        return Knobs.draw(self.chance, args.tier or TIERS[turn % len(TIERS)])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny:glm5_next", help="folder, GGUF file or tiny:NAME")
    parser.add_argument("--minutes", type=float, default=5.0, help="of traffic, over all lives")
    parser.add_argument("--first-share", type=float, default=0.4, help="of the minutes, for the first life")
    parser.add_argument(
        "--shared-share", type=float, default=0.23, help="of the minutes, for the first life of two servers"
    )
    parser.add_argument(
        "--life-minutes", type=float, default=2.0, help="of each later life, at most a fifteenth of all"
    )
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
    return parser.parse_args(arguments)


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
