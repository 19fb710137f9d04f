"""Encoder inputs: who has one, what cross attention must hold of it, and that attention without a cache holds nothing.

Drawn apart from everything else, so that worlds without an encoder stay as they are.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from tests.sim.content import extend, in_group, root
from tests.sim.device import Group, Memory, Rows, versioned
from tests.sim.failure import require
from tests.sim.marks import Marks
from tests.sim.params import BEFORE_ALL_KINDS, Byte, SimParams, fit
from tests.sim.planting import Mutant, replaced
from tests.sim.rng import Streams
from vllm.v1.core import block_hasher
from vllm.v1.core.kv_kinds.base import SingleTypeKVCacheManager
from vllm.v1.core.kv_kinds.cross import CrossAttentionManager, EncoderOnlyAttentionManager
from vllm.v1.core.kv_kinds.full import FullAttentionManager
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.core.sched.waiting_pass import WaitingPass
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec, KVCacheSpec

_CLIPS = ("k", "l")
_HAVE_ONE = 0.85
"""Share of an encoder world's requests with an input for it."""
_WITH_CROSS = 0.09
_ENCODER_ONLY = 0.06


@dataclass(frozen=True)
class Clip:
    """An encoder's input, in the form that the engine's hasher and scheduler ask of it; it stands before the prompt."""

    identifier: str
    length: int
    offset: int = 0

    @property
    def mm_position(self) -> Clip:
        """Where it stands."""
        return self

    def get_num_embeds(self) -> int:
        """Tokens of the encoder's output."""
        return self.length

    def prints(self) -> tuple[int, ...]:
        """What the encoder says at each of its positions. It depends on the whole input."""
        start = root(None, None, self.identifier)
        return tuple(extend(start, position) for position in range(self.length))


class Clips:
    """The encoder inputs of one world's requests: few, so that equal prompts come with different ones."""

    def __init__(self, seed: int, tokens: int) -> None:
        self._rng = Streams(seed).stream("clips")
        lengths = (tokens, max(1, tokens // 2))
        self._clips = [Clip(name, n) for name, n in zip(_CLIPS, lengths, strict=True)] if tokens else []

    def draw(self) -> Clip | None:
        """What a new request brings."""
        if not self._clips or self._rng.random() >= _HAVE_ONE:
            return None
        return self._rng.choice(self._clips)


class CrossGroup(Group):
    """Rows of the encoder's output, written once, by the request's first step, and read whole in every step."""

    def write(self, memory: Memory, rows: Rows) -> None:
        length, table = len(rows.encoder), rows.tables[self.group_id]
        require(
            len(table) == -(-length // self.block_size) and 0 not in table,
            "I6",
            f"{rows.request_id} has blocks {table} for {length} rows of its encoder, {self.block_size} in a block",
        )
        if not rows.encodes:
            return
        for position in range(length):
            if self.context.has(position):
                block, slot = table[position // self.block_size], position % self.block_size
                self._put(memory, block, slot, self._encoded(rows, position))

    def read(self, memory: Memory, rows: Rows) -> None:
        for position in range(len(rows.encoder)):
            if self.context.has(position):
                block = rows.block(self.group_id, position // self.block_size)
                what = f"row {position} of the encoder"
                self._compare(
                    memory, rows, (block, position % self.block_size), self._encoded(rows, position), what
                )

    def _encoded(self, rows: Rows, position: int) -> int:
        stamp = in_group(rows.encoder[position], self.group_id)
        return versioned(stamp, rows.version, self.shard)


class EncoderOnlyGroup(Group):
    """Keeps nothing."""

    def write(self, memory: Memory, rows: Rows) -> None:
        table = rows.tables[self.group_id]
        require(not table, "I6", f"{rows.request_id} has blocks {table} for attention without a cache")


def mark_encoder(marks: Marks, new: NewRequestData, num_preemptions: int) -> None:
    """What a request with an input for its encoder starts with."""
    if new.mm_features and num_preemptions:
        marks.hit("encoder runs again")
    if new.mm_features and new.num_computed_tokens:
        marks.hit("hit beside an encoder's output")


def with_encoder(params: SimParams) -> SimParams:
    """Cross attention in some worlds, whole prompts at a time, as such models are served, and mostly without offload;
    attention without a cache in half of these and in a few others.
    """
    rng = Streams(params.seed).stream("encoder")
    kind = rng.random()
    if kind >= _WITH_CROSS + _ENCODER_ONLY or params.seed in BEFORE_ALL_KINDS:
        return params
    specs = list(params.specs)
    if kind >= _WITH_CROSS:
        _insert(specs, EncoderOnlyAttentionSpec(**_sizes(rng)), rng)
        return replace(params, specs=tuple(specs))
    _insert(specs, CrossAttentionSpec(**_sizes(rng)), rng)
    if rng.random() < 0.5:
        _insert(specs, EncoderOnlyAttentionSpec(**_sizes(rng)), rng)
    return fit(
        replace(
            params,
            specs=tuple(specs),
            encoder_tokens=rng.randint(2, 9),
            host_blocks=0 if rng.random() < 0.6 else params.host_blocks,
            chunked_prefill=False,
            max_num_batched_tokens=max(48, params.max_num_batched_tokens),
        )
    )


def _sizes(rng: random.Random) -> dict[str, Any]:
    return {"block_size": rng.choice((2, 4)), "num_kv_heads": 1, "head_size": 4, "dtype": Byte()}


def _insert(specs: list[KVCacheSpec], spec: KVCacheSpec, rng: random.Random) -> None:
    specs.insert(rng.randint(0, len(specs)), spec)


def _cross_attention_is_found_by_prefix() -> AbstractContextManager[object]:
    """The encoder's rows are taken for those of the prompt's tokens, and found by their hashes."""
    stack = ExitStack()
    stack.enter_context(patch.object(CrossAttentionManager, "supports_prefix_lookup", True))
    stack.enter_context(patch.object(EncoderOnlyAttentionManager, "supports_prefix_lookup", False))
    find = vars(FullAttentionManager)["find_longest_cache_hit"]
    stack.enter_context(patch.object(CrossAttentionManager, "find_longest_cache_hit", find))
    adopt = SingleTypeKVCacheManager.add_local_computed_blocks
    stack.enter_context(patch.object(CrossAttentionManager, "add_local_computed_blocks", adopt))
    return stack


def _attention_without_a_cache_takes_blocks(original: Any) -> Any:
    """As many as the tokens that it is asked for."""
    del original
    return SingleTypeKVCacheManager.allocate_new_blocks


def _encoder_rows_get_no_blocks(original: Any) -> Any:
    """The scheduler does not say how many there are."""
    del original
    return lambda self, request: 0


def _encoder_rows_get_blocks_anew(original: Any) -> Any:
    """They are asked for again with every step, as if they grew with the request."""

    def allocate(self: Any, request_id: str, num_tokens: int, *more: Any, **options: Any) -> Any:
        held = len(self.req_to_blocks.get(request_id, ()))
        grown = held and not isinstance(self, EncoderOnlyAttentionManager)
        return original(self, request_id, (held + 1) * self.block_size if grown else num_tokens, *more)

    return allocate


def _encoder_input_is_ignored() -> AbstractContextManager[object]:
    """Equal prompts with different encoder inputs have equal hashes."""
    return patch.object(block_hasher, "_mm_extra_keys", lambda request, start, end, index: ([], index))


ENCODER_MUTANTS: dict[str, Mutant] = {
    "cross attention is found by prefix": _cross_attention_is_found_by_prefix,
    "attention without a cache takes blocks": replaced(
        EncoderOnlyAttentionManager, "allocate_new_blocks", _attention_without_a_cache_takes_blocks
    ),
    "encoder rows get no blocks": replaced(WaitingPass, "_encoder_tokens", _encoder_rows_get_no_blocks),
    "encoder rows get blocks anew": replaced(
        CrossAttentionManager, "allocate_new_blocks", _encoder_rows_get_blocks_anew
    ),
    "encoder input is ignored": _encoder_input_is_ignored,
}
