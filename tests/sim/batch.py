"""Many seeds over several processes, added up."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tests.sim.checkers import forget_published
from tests.sim.driver import Result, run_seed
from tests.sim.mutants import MUTANTS


@dataclass
class Summary:
    """What a set of seeds found."""

    seeds: int = 0
    ticks: int = 0
    requests: int = 0
    seconds: float = 0.0
    marks: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Count one run."""
        self.seeds += 1
        self.ticks += result.ticks
        self.requests += result.requests
        self.marks += result.marks
        if result.failure is not None:
            self.codes[result.failure.code] += 1
            self.failures.append((result.seed, str(result.failure)))


_Job = tuple[int, int, str | None]

COLLECT_EVERY = 50


def _run_job(job: _Job) -> Result:
    """One run. A run drops all it made at its end, so cycles are looked for between runs only, now and then."""
    seed, ticks, mutant = job
    gc.disable()
    try:
        with MUTANTS[mutant or "none"]():
            result = run_seed(seed, ticks)
    finally:
        gc.enable()
    if seed % COLLECT_EVERY == 0:
        forget_published()
        gc.collect()
    result.actions = []  # long, and the seed gives them back
    return result


def run_batch(
    seeds: Sequence[int],
    ticks: int,
    jobs: int,
    *,
    mutant: str | None = None,
    on_seed: Callable[[Result], object] = lambda result: None,
) -> Summary:
    """Run all seeds in `jobs` processes."""
    summary = Summary()
    started = time.perf_counter()
    todo = [(seed, ticks, mutant) for seed in seeds]
    for result in _results(todo, jobs):
        summary.add(result)
        on_seed(result)
    summary.failures.sort()
    summary.seconds = time.perf_counter() - started
    return summary


def _results(todo: list[_Job], jobs: int) -> Iterable[Result]:
    if jobs <= 1:
        yield from map(_run_job, todo)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_run_job, todo, chunksize=4)


def first_failure(seeds: Iterable[int], ticks: int, mutant: str | None) -> Result | None:
    """The first run that fails, in order of the seeds."""
    for seed in seeds:
        result = _run_job((seed, ticks, mutant))
        if result.failure is not None:
            return result
    return None
