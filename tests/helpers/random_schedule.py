"""Random schedules over pages, compared row by row with the oracle's one-shot logits."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from tests.helpers.paged_harness import PagedHarness, Running
from tests.helpers.tiny_models import oracle_logits
from vllm.model_executor.model_loader.tiny import VOCAB_SIZE

TOLERANCE = 1e-4


@dataclass
class Marks:
    """How often the interesting things happened; tests assert that they did."""

    mixed_steps: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    unaligned_chunks: int = 0


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


def pick_batch(rng: random.Random, running: list[Running], align: int) -> list[tuple[Running, int]]:
    """Some of the running requests, each with a random number of its next tokens."""
    batch = []
    for request in rng.sample(running, rng.randrange(1, len(running) + 1)):
        left = len(request.tokens) - request.computed
        count = 1 if rng.random() < 0.3 else rng.randrange(1, min(left, align + 24) + 1)
        if rng.random() < 0.3:
            count = max(1, min(left, align - request.computed % align))
        batch.append((request, count))
    return batch


def run_random_schedule(
    harness: PagedHarness, oracle: torch.nn.Module, seed: int, align: int = 16, share: bool = True
) -> Marks:
    """Chunks of random length, mixed batches, preemption, shared prefixes; every logit row is compared."""
    rng = random.Random(seed)
    marks = Marks()
    stem = random_tokens(rng, min(4, 2 + 64 // align) * align + 6)
    prompts = [
        stem[: rng.randrange(0, len(stem))] + random_tokens(rng, rng.randrange(2, 25)) for _ in range(6)
    ]
    expected = {tuple(p): oracle_logits(oracle, p) for p in prompts}
    waiting = [*prompts, *prompts[:2]]
    running: list[Running] = []
    for _ in range(600):
        if waiting and len(running) < 4:
            running.append(harness.start(waiting.pop(0)))
            marks.prefix_hits += running[-1].computed > 0
        if running and rng.random() < 0.05:
            victim = running.pop(rng.randrange(len(running)))
            harness.preempt(victim)
            waiting.append(victim.tokens)
            marks.preemptions += 1
            continue
        if not running:
            break
        batch = pick_batch(rng, running, align)
        starts = [request.computed for request, _ in batch]
        marks.mixed_steps += len({count == 1 for _, count in batch}) == 2
        marks.unaligned_chunks += sum(start % 4 != 0 for start in starts)
        for (request, count), first, logits in zip(batch, starts, harness.step(batch), strict=True):
            reference = expected[tuple(request.tokens)][first : first + count]
            torch.testing.assert_close(logits, reference, atol=TOLERANCE, rtol=0)
            if share and rng.random() < 0.5:
                harness.share(request)
            if request.computed == len(request.tokens):
                running.remove(request)
                harness.preempt(request)
    assert not running
    assert not waiting
    return marks
