"""The requests of the soak run and what each must answer: greedy, seeded, constrained, with log-probabilities, aborted.

A case is a request body with the answer it had alone on a cold server. Whatever the server's load, caches and resets,
the tokens must be the same again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import httpx

# Kernels add in another order in another batch, which moves log-probabilities of the tiny models by up to 1e-4: a token
# may flip only where the two best were nearly equal.
TIE = 5e-4
VOCABULARY = (3, 256)
VARIANTS: list[dict[str, Any]] = [
    {},
    {},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"temperature": 0.9, "top_p": 0.9, "seed": 11},
    {"temperature": 1.0, "top_k": 20, "seed": 12},
    {"logit_bias": {"77": 5.0, "78": -100.0}},
    {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{8}"}, "ignore_eos": False},
    {"stop_token_ids": [100, 101, 102, 103, 104, 105, 106, 107]},
    {"min_tokens": 1, "ignore_eos": False},
    {"bad_words": ["a", "e"]},
    {"prompt_logprobs": 2},
]


@dataclass
class Answer:
    """What one request returned, or how it ended."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int = 0
    prompt_tokens: int = 0
    status: int = 200
    message: str = ""
    prompt_logprobs: list[Any] | None = None
    gaps: list[float] = field(default_factory=list)


@dataclass
class Case:
    """A body and its answer on a cold, idle server."""

    body: dict[str, Any]
    wanted: Answer = field(default_factory=Answer)

    def difference(self, got: Answer) -> str | None:
        """How `got` contradicts the solo answer; None if it does not. An aborted answer may be shorter."""
        wanted = self.wanted.token_ids
        if got.finish_reason == "abort":
            wanted = wanted[: len(got.token_ids)]
        if got.token_ids != wanted:
            place = first_difference(got.token_ids, wanted)
            gap = self.wanted.gaps[place] if place < len(self.wanted.gaps) else float("inf")
            if gap < TIE:
                return None
            return (
                f"token {place} differs (gap {gap:.1e}): {got.token_ids[place:][:4]} not {wanted[place:][:4]}"
            )
        if got.finish_reason not in ("abort", self.wanted.finish_reason):
            return f"finish_reason {got.finish_reason} not {self.wanted.finish_reason}"
        return self._prompt_difference(got)

    def _prompt_difference(self, got: Answer) -> str | None:
        if got.prompt_logprobs is None or got.finish_reason == "abort":
            return None
        before, now = self.wanted.prompt_logprobs or [], got.prompt_logprobs
        if len(before) != len(now):
            return f"{len(now)} prompt log-probabilities, not {len(before)}"
        for place, (one, two) in enumerate(zip(before, now, strict=True)):
            shared = (one or {}).keys() & (two or {}).keys()
            worst = max((abs(one[key]["logprob"] - two[key]["logprob"]) for key in shared), default=0.0)
            if not worst <= TIE:
                return f"prompt log-probabilities at {place} differ by {worst:.1e}"
        return None


def first_difference(one: list[int], two: list[int]) -> int:
    """The first place at which two lists differ; the shorter length if one begins the other."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )


def make_cases(count: int, model: str, block: int, seed: int) -> list[Case]:
    """Prompts of a few families that share beginnings of every length round block boundaries."""
    chance = random.Random(seed)
    families = [[chance.randrange(*VOCABULARY) for _ in range(5 * block)] for _ in range(max(2, count // 6))]
    cases = []
    for index in range(count):
        family = chance.choice(families)
        shared = chance.choice([block - 1, block, block + 1, 2 * block, 3 * block + 5, len(family)])
        own = [chance.randrange(*VOCABULARY) for _ in range(chance.choice([1, 3, block // 2, block]))]
        body = {"model": model, "prompt": family[:shared] + own, "max_tokens": chance.choice([1, 8, 24, 64])}
        body |= {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
        cases.append(Case(body | VARIANTS[index % len(VARIANTS)]))
    return cases


def answer_of(body: dict[str, Any]) -> Answer:
    """The answer in a whole reply."""
    choice, usage = body["choices"][0], body["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        token_ids=choice["token_ids"],
        finish_reason=choice["finish_reason"],
        cached_tokens=details.get("cached_tokens") or 0,
        prompt_tokens=usage["prompt_tokens"],
        prompt_logprobs=choice.get("prompt_logprobs"),
        gaps=_gaps(choice.get("logprobs")),
    )


def _gaps(logprobs: dict[str, Any] | None) -> list[float]:
    """Distance between the two best tokens at each position."""
    gaps = []
    for position in (logprobs or {}).get("top_logprobs") or []:
        best = sorted(position.values(), reverse=True)
        gaps.append(best[0] - best[1] if len(best) > 1 else float("inf"))
    return gaps


async def learn(client: httpx.AsyncClient, case: Case) -> None:
    """Asks for the solo answer: nothing cached, nothing else running.

    Raises:
        RuntimeError: the request was refused, or something was cached after all.
    """
    await client.post("/reset_prefix_cache", params={"reset_external": "true"})
    reply = await client.post("/v1/completions", json=case.body | {"logprobs": 2})
    if reply.status_code != 200:
        raise RuntimeError(f"HTTP {reply.status_code}: {reply.text}")
    case.wanted = answer_of(reply.json())
    if case.wanted.cached_tokens:
        raise RuntimeError(f"{case.wanted.cached_tokens} tokens cached on a cold server")
