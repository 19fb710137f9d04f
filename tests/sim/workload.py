"""Requests: prompts from a small tree of shared prefixes over a tiny alphabet, lengths at block edges ± 1."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.sim.content import ALPHABET, Chain, expected_output, root
from tests.sim.encoder import Clip, Clips
from tests.sim.grammar import Constraints, constraint_of
from tests.sim.params import BEFORE_ALL_KINDS, SimParams
from tests.sim.retention import Hints
from vllm.kv_retention import EXTRA_ARG
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import BlockHasher, Request

_PREFIXES = (2, 8)


@dataclass
class Truth:
    """What is known of a request from outside the engine."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    salt: str | None
    adapter: str | None
    priority: int
    chain: Chain = field(repr=False)
    retention: dict[str, Any] | None = None
    """How long its content is worth keeping, as it says."""
    grammar: str | None = None
    """Whether it has a grammar, and whether that can be compiled."""
    clip: Clip | None = None
    """What its encoder reads."""
    output: list[int] = field(default_factory=list)
    """The whole answer of an undisturbed run."""
    delivered: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    cooled: bool = False
    """The device forgot its cache while the request was in the engine."""
    ended_by: str | None = None
    """Why it may end early: aborted, failed load, failed step, NaN."""

    @property
    def identity(self) -> tuple[str | None, str | None, str | None]:
        """What tells its content from that of other requests with the same tokens: salt, adapter, encoder input."""
        return (self.salt, self.adapter, None if self.clip is None else self.clip.identifier)

    @property
    def done(self) -> bool:
        """The client will hear nothing more."""
        return self.finish_reason is not None or self.ended_by == "abort"


class Workload:
    """Draws requests for one seed."""

    def __init__(self, params: SimParams, rng: random.Random) -> None:
        self._params = params
        sizes = {params.tokens_per_block(spec) for spec in params.specs}
        self._edges = sorted(size for size in sizes if size <= 8)
        longest = params.max_model_len
        self._prefixes = [
            [rng.randint(1, ALPHABET) for _ in range(longest)] for _ in range(rng.randint(*_PREFIXES))
        ]
        self._salts = rng.random() < 0.3
        self._adapters = rng.random() < 0.3
        self._hints = Hints(params.seed, params.kv_retention_share)
        self._constraints = Constraints(params.seed, params.grammars)
        self._clips = Clips(params.seed, params.encoder_tokens)
        self._count = 0
        self._repeats = rng.choice((0.2, 0.6, 0.8))
        self._memory = 0
        """From how many of the latest prompts one is repeated or continued; 0 = all."""
        if params.reads_below:
            # What is on the disk only has not been asked for lately.
            self._repeats, self._memory = (0.6, 8) if params.disk_blocks else (0.9, 4)
        self._history: list[list[int]] = []

    def draw(self, rng: random.Random) -> Truth:
        """A new request."""
        params = self._params
        self._count += 1
        prompt = self._prompt(rng, params.max_model_len - 1)
        self._history.append(prompt)
        salt = rng.choice(("s", "X")) if self._salts and rng.random() < 0.4 else None
        adapter = rng.choice(("a", "X")) if self._adapters and rng.random() < 0.4 else None
        truth = Truth(
            request_id=f"r{self._count}",
            prompt=prompt,
            max_tokens=rng.choice((1, 1, 2, 4, 9, 9)),
            ignore_eos=rng.random() < 0.3,
            salt=salt,
            adapter=adapter,
            priority=rng.randint(0, 2),
            chain=Chain(0),
            retention=self._hints.draw(),
            grammar=self._constraints.draw(),
            clip=self._clips.draw(),
        )
        truth.chain = Chain(root(*truth.identity), list(prompt))
        truth.output = expected_output(truth.chain, truth.max_tokens, params.max_model_len, truth.ignore_eos)
        if params.num_spec_tokens and params.seed not in BEFORE_ALL_KINDS:
            # Second turns go on from what drafts have left behind.
            self._history.append([*prompt, *truth.output][: params.max_model_len - 1])
        return truth

    def _prompt(self, rng: random.Random, longest: int) -> list[int]:
        """An earlier conversation again or continued, else a path in the tree with a tail of its own."""
        if self._history and rng.random() < self._repeats:
            earlier = rng.choice(self._history[-self._memory :])
            if rng.random() < 0.5:
                return list(earlier)
            more = rng.randint(1, 6)
            return (earlier + [rng.randint(1, ALPHABET) for _ in range(more)])[:longest]
        prefix = rng.choice(self._prefixes)
        length = self._length(rng, longest)
        shared = length if rng.random() < 0.5 else min(length, self._length(rng, length))
        return prefix[:shared] + [rng.randint(1, ALPHABET) for _ in range(length - shared)]

    def _length(self, rng: random.Random, longest: int) -> int:
        """A length at a block edge, one below or one above."""
        edge = rng.choice(self._edges or [4])
        most = max(1, longest // edge)
        blocks = max(rng.randint(0, most), rng.randint(0, most))
        return max(1, min(longest, edge * blocks + rng.choice((-1, 0, 0, 1))))


def make_request(truth: Truth, arrival_time: float, hasher: BlockHasher | None) -> Request:
    """The engine's request for it."""
    sampling = SamplingParams(
        max_tokens=truth.max_tokens,
        ignore_eos=truth.ignore_eos,
        temperature=0.0,
        structured_outputs=None if truth.grammar is None else constraint_of(truth.grammar, truth.output),
        extra_args=None if truth.retention is None else {EXTRA_ARG: truth.retention},
    )
    sampling.update_from_generation_config({}, 0)
    adapters = {"a": 1, "X": 2}
    lora = None
    if truth.adapter is not None:
        lora = LoRARequest(truth.adapter, adapters[truth.adapter], f"/adapters/{truth.adapter}")
    return Request(
        request_id=truth.request_id,
        prompt_token_ids=list(truth.prompt),
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=arrival_time,
        lora_request=lora,
        cache_salt=truth.salt,
        priority=truth.priority,
        mm_features=None if truth.clip is None else [truth.clip],
        block_hasher=hasher,
    )
