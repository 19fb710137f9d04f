"""No registered kind of KV cache is without a model on the fake device or without worlds that draw it; what the models
notice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.helpers.registered_kinds import registered_kinds
from tests.sim.content import Chain, root
from tests.sim.device import POISON, Memory, Page, Rows, forward
from tests.sim.encoder import Clip
from tests.sim.failure import SimFailure
from tests.sim.kinds import MODELS, make_groups
from tests.sim.params import Byte
from tests.sim.worlds import draw_params
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)

WORLDS = 300
WORLDS_MIN = 6
"""Worlds of each kind: as few as that are hardly enough to catch a bug of it."""
SIZES = {"block_size": 2, "num_kv_heads": 1, "head_size": 4, "dtype": Byte()}
CROSS = CrossAttentionSpec(**SIZES)
FULL = FullAttentionSpec(**SIZES)


def test_each_registered_kind_has_a_model_and_is_drawn_by_some_worlds() -> None:
    kinds = set(registered_kinds())
    assert kinds == MODELS.keys()
    drawn: Counter[type[KVCacheSpec]] = Counter()
    for seed in range(WORLDS):
        specs = draw_params(seed).specs
        drawn.update({type(layer) for spec in specs for layer in iter_layer_specs(spec)})
        drawn.update({type(spec) for spec in specs if isinstance(spec, UniformTypeKVCacheSpecs)})
    rare = {
        kind.__name__: drawn[kind] for kind in {*kinds, UniformTypeKVCacheSpecs} if drawn[kind] < WORLDS_MIN
    }
    assert not rare, (
        f"kinds in too few of {WORLDS} worlds; see with_other_kinds in tests/sim/kinds.py: {rare}"
    )


def rows(tables: list[list[int]], *, start: int = 0, end: int = 4, clip: Clip | None = None) -> Rows:
    encoder = () if clip is None else clip.prints()
    chain = Chain(root(None, None), [1] * end)
    return Rows("r1", chain, tables, start, end, prompt_end=4, encoder=encoder, encodes=start == 0)


def test_rows_of_the_encoder_are_those_of_the_first_step() -> None:
    memory, groups, clip = Memory(9), make_groups([CROSS], 1), Clip("k", 3)
    forward(memory, groups, [rows([[1, 2]], clip=clip)])
    forward(memory, groups, [rows([[1, 2]], start=4, end=5, clip=clip)])
    with pytest.raises(SimFailure, match="another prefix for row 0 of the encoder"):
        forward(memory, groups, [rows([[1, 2]], start=4, end=5, clip=Clip("l", 3))])
    with pytest.raises(SimFailure, match="poison for row 0 of the encoder"):
        forward(memory, groups, [rows([[3, 4]], start=4, end=5, clip=clip)])


@pytest.mark.parametrize("table", [[], [1], [1, 2, 3], [1, 0]])
def test_the_encoder_has_as_many_blocks_as_its_rows_need(table: list[int]) -> None:
    with pytest.raises(SimFailure, match="for 3 rows of its encoder"):
        forward(Memory(9), make_groups([CROSS], 1), [rows([table], clip=Clip("k", 3))])


def test_attention_without_a_cache_has_no_block() -> None:
    groups = make_groups([EncoderOnlyAttentionSpec(**SIZES)], 1)
    forward(Memory(9), groups, [rows([[]])])
    with pytest.raises(SimFailure, match="attention without a cache"):
        forward(Memory(9), groups, [rows([[1]])])


def test_an_answer_reads_the_prompt_and_its_window_only() -> None:
    memory, groups = Memory(9), make_groups([RSWASpec(**SIZES, rswa_window=2)], 1)
    forward(memory, groups, [rows([[1, 2, 3, 4]], end=8)])
    memory.page(3).poison()  # tokens 4 and 5, of the answer
    forward(memory, groups, [rows([[1, 2, 3, 4, 5]], start=8, end=9)])
    memory.page(2).poison()
    with pytest.raises(SimFailure, match="poison for token 2"):
        forward(memory, groups, [rows([[1, 2, 3, 4, 5]], start=8, end=10)])


def test_a_page_of_several_layers_has_the_rows_of_each() -> None:
    layers = {
        "a": FULL,
        "b": replace(FULL, head_size=6),
        "c": MLAAttentionSpec(**SIZES),
    }
    uniform = UniformTypeKVCacheSpecs.from_specs(layers)
    assert uniform is not None
    memory, (group,) = Memory(9), make_groups([uniform], 1)
    batch = rows([[1, 2]])
    forward(memory, [group], [batch])
    page = memory.page(2)
    assert dict(enumerate(page.slots)) == group.expected_page(batch.chain.prints, 0)
    assert len(set(page.slots)) == 6
    part = Page()
    for slot in range(4):  # a copy that forgets the last layer
        part.copy_slot(page, slot)
    memory.pages[2] = part
    with pytest.raises(SimFailure, match="poison for token 2"):
        forward(memory, [group], [rows([[1, 2, 3]], start=4, end=5)])


def test_a_row_that_tokens_share_is_written_with_the_last_of_them() -> None:
    pooled = MLAAttentionSpec(**SIZES | {"block_size": 4}, tokens_per_state=2)
    memory, (group,) = Memory(9), make_groups([pooled], 1)
    batch = rows([[1, 2]], end=7)
    forward(memory, [group], [batch])
    assert dict(enumerate(memory.page(1).slots)) == group.expected_page(batch.chain.prints[:5], 0)
    assert memory.page(2).slots == [*group.expected_page(batch.chain.prints[:7], 0).values(), POISON]
    forward(memory, [group], [rows([[1, 2]], start=7, end=8)])
    memory.page(1).poison()
    with pytest.raises(SimFailure, match="poison for token 1"):
        forward(memory, [group], [rows([[1, 2, 3]], start=8, end=9)])
