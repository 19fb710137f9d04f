"""Typed page views: where rows and states lie, what is left alone, which state pages a step reads and writes."""

from __future__ import annotations

import pytest
import torch

from vllm.v1.attention.backend import GroupMeta, StepMeta
from vllm.v1.attention.pages import KVHeadPages, RingPages, RowPages, StatePages, ring_slots, slots_of
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
)


def raw_pages(count: int, page_bytes: int) -> torch.Tensor:
    """Strided views, as they come from an allocation that several layers share."""
    return torch.zeros(count, page_bytes + 128, dtype=torch.int8)[:, 64 : 64 + page_bytes]


def test_head_pages_are_head_token_content() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=3, head_size_v=5, dtype=torch.float32)
    pages = KVHeadPages("a", spec)
    raw = raw_pages(3, spec.page_size_bytes)
    pages.bind_kv_cache(raw)
    key, value = torch.randn(2, 2, 3), torch.randn(2, 2, 5)
    pages.write(key, value, torch.tensor([6, 11]))
    flat = raw.contiguous().view(torch.float32).view(3, 2, 4, 8)
    assert torch.equal(flat[1, :, 2, :3], key[0])
    assert torch.equal(flat[2, :, 3, 3:], value[1])
    assert pages.kv_spec() is spec


def test_gather_follows_the_block_table_and_may_start_late() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype=torch.float32)
    pages = KVHeadPages("a", spec)
    pages.bind_kv_cache(raw_pages(5, spec.page_size_bytes))
    row = torch.tensor([3, 1, 4], dtype=torch.int32)
    positions = torch.arange(10)
    slots = row[positions // 4].to(torch.int64) * 4 + positions % 4
    pages.write(positions.float()[:, None, None], -positions.float()[:, None, None], slots)
    keys, values = pages.gather(row, 10)
    assert keys.flatten().tolist() == list(range(10))
    keys, values = pages.gather(row, 9, first=6)
    assert keys.flatten().tolist() == [6, 7, 8]
    assert values.flatten().tolist() == [-6, -7, -8]


def test_a_planned_block_size_replaces_the_models_own() -> None:
    spec = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=2, dtype=torch.float32)
    pages = RowPages("a", spec)
    planned = spec.copy_with_new_block_size(8)
    pages.bind_kv_cache(raw_pages(3, planned.page_size_bytes), planned)
    assert pages.rows_per_block == 8
    assert pages.kv_spec() is planned


def test_compressed_rows_take_several_tokens() -> None:
    spec = MLAAttentionSpec(
        block_size=8, num_kv_heads=1, head_size=2, dtype=torch.float32, tokens_per_state=4
    )
    pages = RowPages("a", spec)
    pages.bind_kv_cache(raw_pages(4, spec.page_size_bytes))
    pages.write(torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]]), torch.tensor([6, 7, 2, 1]))
    row = torch.tensor([3, 1], dtype=torch.int32)
    assert pages.gather(row, 3).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert pages.gather_at(row, torch.tensor([2, 0])).tolist() == [[5, 6], [1, 2]]
    assert not pages.pages[0].any()  # the row aimed at the null block was dropped


def test_a_chunk_longer_than_the_ring_leaves_its_last_rows() -> None:
    spec = CircularBufferSpec(
        block_size=4, num_kv_heads=2, head_size=1, head_size_v=0, dtype=torch.float32, dcp_sharded=False
    )
    ring = RingPages("a", spec)
    ring.bind_kv_cache(raw_pages(3, spec.page_size_bytes))
    positions = torch.arange(3, 14)
    table = torch.tensor([[2]], dtype=torch.int32)
    group = GroupMeta(4, table, 2 * 4 + positions % 4)
    meta = step([3], [11], {"a": group})
    rows = positions.float()[:, None]
    ring.write((rows, -rows), ring_slots(meta, group))
    assert ring.pages[2].flatten(1).tolist() == [[12, 13, 10, 11], [-12, -13, -10, -11]]
    assert not ring.pages[:2].any()


def step(contexts: list[int], queries: list[int], groups: dict[str, GroupMeta]) -> StepMeta:
    return StepMeta(
        num_reqs=len(contexts),
        num_tokens=sum(queries),
        query_start=torch.tensor([0, *queries]).cumsum(0).to(torch.int32),
        query_lens=queries,
        context_lens=contexts,
        seq_lens=[c + q for c, q in zip(contexts, queries, strict=True)],
        positions=torch.cat([torch.arange(c, c + q) for c, q in zip(contexts, queries, strict=True)]),
        num_decodes=0,
        groups=groups,
    )


@pytest.mark.parametrize(
    ("size", "contexts", "queries", "source", "target"),
    [
        (16, [0, 5, 16, 31, 32], [3, 1, 1, 2, 16], [-1, 10, 20, 31, 41], [0, 10, 21, 32, 42]),
        (4096, [0, 5, 16, 31, 32], [3, 1, 1, 2, 16], [-1, 10, 20, 30, 40], [0, 10, 20, 30, 40]),
    ],
)
def test_state_pages_of_a_step(
    size: int, contexts: list[int], queries: list[int], source: list[int], target: list[int]
) -> None:
    table = torch.tensor([[10 * r + c for c in range(4)] for r in range(5)], dtype=torch.int32)
    group = GroupMeta(size, table)
    meta = step(contexts, queries, {"a": group})
    blocks = StatePages.blocks(meta, group)
    assert (blocks.source, blocks.target) == (source, target)
    assert StatePages.blocks(meta, group) is blocks


def test_states_lie_one_after_another() -> None:
    spec = MambaSpec(block_size=16, shapes=((3, 4), (2, 2, 2)), dtypes=(torch.bfloat16, torch.float32))
    pages = StatePages("a", spec)
    raw = raw_pages(2, spec.page_size_bytes)
    pages.bind_kv_cache(raw)
    conv, state = pages.states
    conv[1], state[1] = 1.0, 2.0
    assert raw[1, :24].view(torch.bfloat16).eq(1).all()
    assert raw[1, 24:56].view(torch.float32).eq(2).all()
    assert not raw[0].any()
    odd = MambaSpec(block_size=16, shapes=((1, 3), (2,)), dtypes=(torch.bfloat16, torch.float32))
    with pytest.raises(ValueError, match="a torch.float32 state would start at byte 6"):
        StatePages("a", odd).bind_kv_cache(raw_pages(2, 64))


def test_a_group_of_states_has_no_slots() -> None:
    with pytest.raises(ValueError, match="its group has none"):
        slots_of(GroupMeta(4, torch.zeros(1, 1, dtype=torch.int32)))
