"""The second server of a soak life: on the pool of the first, killed and started again while that one serves.

It must outlive the first one, and its end in order must leave no shared memory.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx

from benchmarks.soak_server import Process, Stream
from benchmarks.soak_traffic import KILLS, Traffic

OUTLIVE_S = 3.0


class Peer:
    """One server at a time, always with the same flags."""

    def __init__(self, traffic: Traffic, model: Path, flags: list[str], folder: Path) -> None:
        self._traffic, self._model, self._flags, self._folder = traffic, model, flags, folder
        self._starts = 0
        self._process: Process | None = None
        self._streams: list[Stream] = []

    async def start(self) -> Process:
        """Starts it, again if there was one, and waits until it serves."""
        self.close()
        process = Process.start(self._model, self._flags, self._folder / str(self._starts))
        self._process = process
        self._starts += 1
        async with self._traffic.client(process) as client:
            await self._traffic.ready(process, client)
        self._streams = process.streams(1)
        await asyncio.sleep(0.5)
        for stream in self._streams:
            await asyncio.to_thread(stream.begin)
        return process

    async def run(self, until: float) -> None:
        """Traffic until then, with a kill of the front end and one of the core in between, if there is time."""
        began = time.monotonic()
        for number, kill in enumerate(KILLS):
            await self._serve(began + (until - began) * (number + 1) / (len(KILLS) + 1))
            if time.monotonic() < until:
                assert self._process is not None
                await self._traffic.end(self._process, kill)
                await self.start()
                self._traffic.tally.counts["second server killed and restarted"] += 1
        await self._serve(until)

    async def outlive(self) -> None:
        """The first server is gone: goes on, holds nothing when it is quiet, and ends in order."""
        process = self._process
        if process is None or process.popen.poll() is not None:
            self._traffic.tally.fault("the second server ended by itself")
            return
        await self._serve(time.monotonic() + OUTLIVE_S)
        async with self._traffic.client(process) as client:
            await self._traffic.check_quiet(process, client, self._streams)
        await self._traffic.end(process, "SIGTERM")

    async def _serve(self, until: float) -> None:
        process = self._process
        assert process is not None

        async def repeat(client: httpx.AsyncClient) -> None:
            while time.monotonic() < until and process.popen.poll() is None:
                await self._traffic.send(client)
                await asyncio.sleep(0.1 * self._traffic.chance.random())

        async with self._traffic.client(process) as client:
            await asyncio.gather(*(repeat(client) for _ in range(self._traffic.concurrency // 2)))
        if process.popen.poll() is not None:
            self._traffic.tally.fault(f"the second server ended by itself: {process.popen.returncode}")

    def close(self) -> None:
        """Ends what is left of it by force."""
        for stream in self._streams:
            stream.close()
        self._streams = []
        if self._process is not None:
            self._process.kill()
