"""Time of one scheduling step (schedule + update_from_output) without a model.

`python benchmarks/bench_scheduler.py [--requests 256] [--steps 400] [--specs full|hybrid|window]` runs a batch of decodes
over the real KV cache manager and prints the time per step for the plain scheduler and the one with look-ahead, split
into its two halves.  Nothing is computed: the fake runner returns one token per request.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.sched import full, make_request, make_scheduler, mamba, window
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput

MODELS: dict[str, list[KVCacheSpec]] = {
    "full": [full(16)],
    "window": [full(16), window(16, 1024)],
    "hybrid": [full(16), mamba(16)],
}
PROMPT_TOKENS = 100


@dataclass
class Timing:
    """Seconds per step, of both halves."""

    schedule: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)

    def line(self) -> str:
        """Medians and the 99th percentile of the sum, in milliseconds."""
        total = [a + b for a, b in zip(self.schedule, self.update, strict=True)]
        worst = statistics.quantiles(total, n=100)[98]
        parts = [statistics.median(values) * 1e3 for values in (self.schedule, self.update, total)]
        return f"schedule {parts[0]:.3f} + update {parts[1]:.3f} = {parts[2]:.3f} ms (p99 {worst * 1e3:.3f})"


def build(specs: list[KVCacheSpec], num_requests: int, num_steps: int, looks_ahead: bool) -> Scheduler:
    """A scheduler whose requests have all been prefilled."""
    tokens = PROMPT_TOKENS + num_steps + 64
    scheduler = make_scheduler(
        specs,
        num_requests * len(specs) * (tokens // 16 + 4),
        max_num_seqs=num_requests,
        max_num_batched_tokens=max(8192, num_requests),
        max_model_len=tokens + 64,
        looks_ahead=looks_ahead,
    )
    for i in range(num_requests):
        prompt = [(i * 31 + j) % 1000 for j in range(PROMPT_TOKENS)]
        scheduler.add_request(make_request(scheduler, f"request-{i}", prompt, num_steps + 60))
    return scheduler


def run(scheduler: Scheduler, num_steps: int, depth: int) -> Timing:
    """Time `num_steps` steps once every request decodes."""
    timing = Timing()
    in_flight: deque[SchedulerOutput] = deque()
    clock = time.thread_time  # other processes on the machine do not count
    measured = False
    while len(timing.update) < num_steps:
        start = clock()
        in_flight.append(scheduler.schedule())
        middle = clock()
        if len(in_flight) < depth:
            continue
        output = in_flight.popleft()
        ids = list(output.num_scheduled_tokens)
        sampled = [[5] if request_is_done(scheduler, output, name) else [] for name in ids]
        result = ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, sampled)
        before = clock()
        scheduler.update_from_output(output, result)
        after = clock()
        measured = measured or all(not request.is_prefill_chunk for request in scheduler.running)
        if measured and not scheduler.waiting:
            timing.schedule.append(middle - start)
            timing.update.append(after - before)
    return timing


def request_is_done(scheduler: Scheduler, output: SchedulerOutput, name: str) -> bool:
    """Whether the step samples for the request."""
    return name not in scheduler._in_flight.partial_prefills(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256, help="decodes per step")
    parser.add_argument("--steps", type=int, default=400, help="steps to measure")
    parser.add_argument("--specs", choices=sorted(MODELS), default="full", help="KV groups of the model")
    options = parser.parse_args()
    gc.disable()
    for name, looks_ahead in (("plain", False), ("look-ahead", True)):
        scheduler = build(MODELS[options.specs], options.requests, options.steps, looks_ahead)
        timing = run(scheduler, options.steps, 2 if looks_ahead else 1)
        print(f"{name:>10}: {timing.line()}")


if __name__ == "__main__":
    main()
