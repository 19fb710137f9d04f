"""The pooled-key indexer: ring sizes and slots, pooling across chunks, selection, what must never be written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm.model_executor.layers.kpool import (
    IndexerShape,
    KpoolIndexer,
    ring_capacity,
    stable_topk_mask,
)
from vllm.model_executor.model_loader.dummy import fill_random
from vllm.v1.attention.backend import GroupMeta, MultipleOf, StepMeta
from vllm.v1.attention.backends.mla.indexer import (
    KpoolTailBackend,
    KpoolTailMetadataBuilder,
    ring_slot_mapping,
)
from vllm.v1.attention.pages import RingPages, RowPages
from vllm.v1.kv_cache_interface import CircularBufferSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

POOL, DIM, BLOCK = 4, 8, 16
SHAPE = IndexerShape(
    hidden_size=32, q_rank=12, num_heads=3, head_dim=DIM, topk=8, pool=POOL, dtype=torch.float32
)


class Rig:
    """One indexer with its two caches over NaN-poisoned pages."""

    def __init__(self, capacity: int = POOL) -> None:
        keys_spec = MLAAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=DIM, dtype=torch.float32, tokens_per_state=POOL
        )
        ring_spec = CircularBufferSpec(
            block_size=capacity,
            num_kv_heads=2,
            head_size=DIM,
            head_size_v=0,
            dtype=torch.float32,
            dcp_sharded=False,
        )
        self.keys, self.ring = RowPages("keys", keys_spec), RingPages("ring", ring_spec)
        self.raw: dict[str, torch.Tensor] = {}
        for pages, spec in ((self.keys, keys_spec), (self.ring, ring_spec)):
            memory = torch.full((12, spec.page_size_bytes), -1, dtype=torch.int8)
            self.raw[pages.cache_name] = memory
            pages.bind_kv_cache(memory)
        self.indexer = KpoolIndexer(SHAPE, self.keys, self.ring)
        with torch.inference_mode():
            fill_random(self.indexer)

    def step(self, x: torch.Tensor, context: int, **changes: Any) -> list[torch.Tensor | None]:
        """Runs `x [T, 32]` as the next tokens of one request with blocks 3, 5, 2, 9 and ring block 7."""
        with torch.inference_mode():
            return self.indexer.forward(x, x[:, :12], self.meta(x.shape[0], context, **changes))

    def meta(self, count: int, context: int, ring_block: int = 7, keep_slots: bool = True) -> StepMeta:
        positions = torch.arange(context, context + count)
        table = torch.tensor([[3, 5, 2, 9]], dtype=torch.int32)
        slots = table[0, positions // BLOCK].to(torch.int64) * BLOCK + positions % BLOCK
        if not keep_slots:
            slots = torch.full_like(slots, -1)
        ring_table = torch.tensor([[ring_block]], dtype=torch.int32)
        capacity = self.ring.capacity
        ring_slots = ring_slot_mapping(ring_table, torch.zeros(count, dtype=torch.int64), positions, capacity)
        return StepMeta(
            num_reqs=1,
            num_tokens=count,
            query_start=torch.tensor([0, count], dtype=torch.int32),
            query_lens=[count],
            context_lens=[context],
            seq_lens=[context + count],
            positions=positions,
            num_decodes=0,
            groups={
                "keys": GroupMeta(BLOCK, table, slots),
                "ring": GroupMeta(capacity, ring_table, ring_slots),
            },
        )

    def pooled(self, count: int) -> torch.Tensor:
        return self.keys.gather(torch.tensor([3, 5, 2, 9]), count).clone()


@pytest.mark.parametrize(
    ("pool", "speculative", "rows"),
    [(4, 0, 4), (4, 1, 8), (4, 4, 8), (4, 5, 16), (16, 0, 16), (16, 3, 32), (1, 0, 1), (1, 2, 4)],
)
def test_ring_capacity_leaves_room_for_drafts(pool: int, speculative: int, rows: int) -> None:
    assert ring_capacity(pool, speculative) == rows


def test_ring_slots_wrap_and_skip_null_rings() -> None:
    positions = torch.tensor([6, 7, 8, 9, 6])
    rows = torch.tensor([0, 0, 0, 0, 1])
    table = torch.tensor([[5], [0]], dtype=torch.int32)
    assert ring_slot_mapping(table, rows, positions, 8).tolist() == [46, 47, 40, 41, -1]
    query_start = torch.tensor([0, 4, 5], dtype=torch.int32)
    built = KpoolTailMetadataBuilder(8).build(table, query_start, positions)
    assert built.slot_mapping.tolist() == [46, 47, 40, 41, -1]


@pytest.mark.parametrize("capacity", [0, -4])
def test_ring_capacity_must_be_positive(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"ring capacity must be positive, got {capacity}"):
        KpoolTailMetadataBuilder(capacity)


def test_tail_backend_is_storage_for_any_block_size() -> None:
    assert KpoolTailBackend.get_name() == "KPOOL_TAIL"
    assert KpoolTailBackend.get_supported_kv_cache_layouts() == (KVCacheLayout.BLHNC,)
    assert KpoolTailBackend.get_supported_head_sizes() == []
    assert KpoolTailBackend.get_supported_kernel_block_sizes() == [MultipleOf(1)]
    assert KpoolTailBackend.supports_block_size(7)
    assert KpoolTailBackend.get_builder_cls() is KpoolTailMetadataBuilder
    assert KpoolTailBackend.get_kv_cache_shape(10, 4, 2, 128) == (10, 2, 4, 128)


@pytest.mark.parametrize("capacity", [4, 8])
@pytest.mark.parametrize("cuts", [[30], [1] * 30, [3, 5, 1, 1, 7, 2, 11], [2, 28], [13, 17]])
def test_pooled_keys_and_selection_do_not_depend_on_chunks(capacity: int, cuts: list[int]) -> None:
    torch.manual_seed(1)
    x = torch.randn(30, 32)
    whole, parts = Rig(capacity), Rig(capacity)
    (expected,) = whole.step(x, 0)
    assert expected is not None
    start = 0
    for count in cuts:
        (mask,) = parts.step(x[start : start + count], start)
        end = start + count
        if mask is not None:
            assert torch.equal(mask, expected[start:end, :end])
        else:
            assert end // POOL <= SHAPE.topk // POOL
        start = end
    torch.testing.assert_close(parts.pooled(7), whole.pooled(7), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(parts.ring.pages[7], whole.ring.pages[7], atol=1e-6, rtol=1e-6)


def test_pooled_key_is_a_softmax_mean_per_channel() -> None:
    rig = Rig()
    torch.manual_seed(2)
    x = torch.randn(8, 32)
    rig.step(x, 0)
    with torch.inference_mode():
        key, gate, _ = rig.indexer.narrow.split(rig.indexer.narrow(x))
        key = rig.indexer.key_norm(key)
        weights = (gate[4:8] + rig.indexer.position_bias).softmax(0)
        torch.testing.assert_close(rig.pooled(2)[1], (weights * key[4:8]).sum(0), atol=1e-6, rtol=1e-6)


def test_the_ring_is_read_before_it_is_overwritten() -> None:
    # Token 7 completes group 1; tokens 8.. land on the slots of tokens 4..6 in the same step.
    torch.manual_seed(3)
    x = torch.randn(20, 32)
    whole, parts = Rig(), Rig()
    whole.step(x, 0)
    parts.step(x[:7], 0)
    parts.step(x[7:], 7)
    torch.testing.assert_close(parts.pooled(5), whole.pooled(5), atol=1e-6, rtol=1e-6)


def test_tail_and_complete_groups_are_what_a_token_may_read() -> None:
    rig = Rig()
    torch.manual_seed(4)
    (mask,) = rig.step(torch.randn(23, 32), 0)
    assert mask is not None
    for p in range(23):
        seen = mask[p].nonzero().flatten().tolist()
        complete = (p + 1) // POOL
        assert set(range(complete * POOL, p + 1)) <= set(seen)
        assert max(seen) <= p
        groups = [g for g in range(complete) if g * POOL in seen]
        assert len(groups) == min(complete, SHAPE.topk // POOL)
        assert all(set(range(g * POOL, (g + 1) * POOL)) <= set(seen) for g in groups)


def test_short_contexts_select_everything_without_scoring() -> None:
    assert Rig().step(torch.randn(11, 32), 0) == [None]


def test_resume_inside_a_group_without_ring_is_refused_but_aligned_resume_works() -> None:
    torch.manual_seed(5)
    x = torch.randn(32, 32)
    whole = Rig()
    whole.step(x, 0)
    for start in range(0, 32, POOL):
        resumed = Rig()
        resumed.keys.pages.copy_(whole.keys.pages)  # a prefix hit: pooled keys are there, the ring is not
        resumed.ring.pages.fill_(float("nan"))
        resumed.step(x[start:], start)
        torch.testing.assert_close(resumed.pooled(8), whole.pooled(8), atol=1e-6, rtol=1e-6)
    with pytest.raises(
        ValueError, match="chunk starts inside a group of 4 tokens whose rows are not in a ring"
    ):
        Rig().step(x[5:], 5, ring_block=0)


def test_null_ring_and_null_slots_are_never_written() -> None:
    rig = Rig()
    rig.step(torch.randn(9, 32), 0, ring_block=0, keep_slots=False)
    assert all(bool((memory == -1).all()) for memory in rig.raw.values())


def test_replayed_tokens_leave_cached_keys_alone() -> None:
    rig = Rig()
    torch.manual_seed(6)
    rig.step(torch.randn(16, 32), 0)
    before = rig.pooled(4)
    rig.step(torch.randn(8, 32), 8, keep_slots=False)
    assert torch.equal(rig.pooled(4), before)


def test_topk_is_stable_and_the_lowest_index_wins() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, 1.0, 0.0], [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]])
    valid = torch.tensor([[True] * 6, [False, True, True, True, False, True]])
    mask = stable_topk_mask(scores, valid, 4)
    assert mask[0].nonzero().flatten().tolist() == [0, 1, 2, 4]
    assert stable_topk_mask(scores, valid, 3)[1].nonzero().flatten().tolist() == [1, 2, 3]
    assert mask[1].nonzero().flatten().tolist() == [1, 2, 3, 5]


def test_topk_takes_all_when_fewer_are_valid() -> None:
    valid = torch.tensor([[True, False, True, False]])
    assert torch.equal(stable_topk_mask(torch.zeros(1, 4), valid, 3), valid)
