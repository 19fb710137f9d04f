"""Hit search of the kinds, on hashes planted by hand."""

from __future__ import annotations

import random

import pytest

from tests.helpers.kv_core import chunked, fake_hashes, full, ids, mamba, plant, ring, window
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    CircularBufferManager,
    CrossAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)

FIRST_ID = 10


def search(manager_class, spec, cached, max_length, drop=False, alignment=None, hash_block=None):
    """Hit of one group where `cached[i]` says whether block i is cached."""
    pool = BlockPool(200, True, hash_block or spec.block_size)
    hashes = fake_hashes(len(cached))
    plant(pool, hashes, [i for i, c in enumerate(cached) if c], 0, FIRST_ID)
    (blocks,), length = manager_class.find_longest_cache_hit(
        hashes, max_length, [0], pool, spec, drop, alignment or spec.block_size
    )
    return ids(blocks), length


def t(text: str) -> list[bool]:
    return [c == "x" for c in text]


class TestFull:
    def test_runs_left_to_right_until_the_first_miss(self) -> None:
        assert search(FullAttentionManager, full(4), t("xx.x"), 100) == ([10, 11], 8)
        assert search(FullAttentionManager, full(4), t(".xxx"), 100) == ([], 0)

    def test_obeys_the_limit(self) -> None:
        assert search(FullAttentionManager, full(4), t("xxx"), 11) == ([10, 11], 8)
        assert search(FullAttentionManager, full(4), t("xxx"), 12) == ([10, 11, 12], 12)
        assert search(FullAttentionManager, full(4), t("xxx"), 3) == ([], 0)

    def test_drops_the_last_block_for_the_drafter(self) -> None:
        assert search(FullAttentionManager, full(4), t("xxx"), 100, drop=True) == ([10, 11], 8)
        assert search(FullAttentionManager, full(4), t("..."), 100, drop=True) == ([], 0)

    def test_ends_on_the_alignment(self) -> None:
        assert search(FullAttentionManager, full(4), t("xxx"), 100, alignment=8) == ([10, 11], 8)

    def test_goes_on_inside_the_next_block(self) -> None:
        # Hash units of 2 in blocks of 4: unit 5 (tokens 8..10) ends inside block 2.
        cached = [False, True, False, True, True]
        assert search(FullAttentionManager, full(4), cached, 100, alignment=2, hash_block=2) == (
            [11, 13, 14],
            10,
        )

    def test_a_block_cached_whole_serves_a_shorter_end(self) -> None:
        cached = [False, True, False, True]
        assert search(FullAttentionManager, full(4), cached, 7, alignment=2, hash_block=2) == ([11, 13], 6)
        assert search(FullAttentionManager, full(4), cached, 5, alignment=2, hash_block=2) == ([11], 4)
        assert search(FullAttentionManager, full(4), cached, 3, alignment=2, hash_block=2) == ([11], 2)

    def test_drops_one_hash_unit_where_hits_end_inside_blocks(self) -> None:
        cached = [False, True, False, True]
        got = search(FullAttentionManager, full(4), cached, 100, drop=True, alignment=2, hash_block=2)
        assert got == ([11, 13], 6)

    def test_counts_blocks_over_all_context_parallel_ranks(self) -> None:
        pool = BlockPool(20, True, 8)
        hashes = fake_hashes(3)
        plant(pool, hashes, [0, 1, 2], 0, FIRST_ID)
        (blocks,), length = FullAttentionManager.find_longest_cache_hit(
            hashes, 20, [0], pool, full(4), False, 8, dcp_world_size=2
        )
        assert (ids(blocks), length) == ([10, 11], 16)


class TestSlidingWindow:
    spec = window(2, 4)  # needs 2 blocks

    @pytest.mark.parametrize(
        ("cached", "expected"),
        [
            ("..........", 0),
            ("x", 1),
            ("x.", 1),
            ("xx", 2),
            ("xx.", 2),
            ("xxx", 3),
            ("xxx.", 3),
            ("xx.x..xx.xxx", 12),
            ("xx.x..xx.xx.", 11),
            ("xx.x..xx.x..", 8),
            ("xx.x.....x.x", 2),
            (".x.x.x.x", 0),
        ],
    )
    def test_needs_a_whole_window_before_its_end(self, cached: str, expected: int) -> None:
        for tail in (0, 1):
            blocks, length = search(SlidingWindowManager, self.spec, t(cached), 2 * len(cached) + tail)
            assert length == 2 * expected
            assert blocks == [0] * max(0, expected - 2) + [
                10 + i for i in range(max(0, expected - 2), expected)
            ]

    def test_drop_needs_one_block_more_and_gives_it_back(self) -> None:
        assert search(SlidingWindowManager, self.spec, t("..xxx."), 12, drop=True) == ([0, 0, 12, 13], 8)
        assert search(SlidingWindowManager, self.spec, t("..xx.."), 12, drop=True) == ([], 0)
        assert search(SlidingWindowManager, self.spec, t("xx...."), 12, drop=True) == ([10], 2)
        assert search(SlidingWindowManager, self.spec, t("x....."), 12, drop=True) == ([], 0)

    def test_ends_on_the_alignment(self) -> None:
        assert search(SlidingWindowManager, self.spec, t("xxxxx"), 10, alignment=4) == ([0, 0, 12, 13], 8)
        assert search(SlidingWindowManager, self.spec, t("xxxxx"), 10, drop=True, alignment=4)[1] == 8
        assert search(SlidingWindowManager, self.spec, t("xxxx."), 10, drop=True, alignment=4)[1] == 4

    def test_a_window_of_one_token_needs_nothing(self) -> None:
        assert search(SlidingWindowManager, window(4, 1), t("..."), 12) == ([0, 0, 0], 12)

    def test_a_complete_miss_looks_once_per_window(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looks = 0
        original = BlockPool.get_cached_block

        def counting(pool, block_hash, groups):
            nonlocal looks
            looks += 1
            return original(pool, block_hash, groups)

        monkeypatch.setattr(BlockPool, "get_cached_block", counting)
        assert search(SlidingWindowManager, window(16, 1024), t("." * 2048), 1 << 20) == ([], 0)
        assert looks <= 2048 // 64 + 1


class TestChunkedLocal:
    spec = chunked(2, 4)

    @pytest.mark.parametrize(
        ("cached", "tail", "expected"),
        [
            ("x", 0, 1),
            ("x", 1, 1),
            ("x.", 0, 2),
            ("x.", 1, 2),
            ("xx", 0, 2),
            ("xx", 1, 2),
            ("xx.", 0, 2),
            ("xx.", 1, 2),
            ("xxx", 0, 3),
            ("xxx", 1, 3),
            ("xxx.", 0, 4),
            ("xxx.", 1, 4),
        ],
    )
    def test_needs_only_the_chunk_it_ends_in(self, cached: str, tail: int, expected: int) -> None:
        blocks, length = search(ChunkedLocalAttentionManager, self.spec, t(cached), 2 * len(cached) + tail)
        assert (len(blocks), length) == (expected, 2 * expected)

    @pytest.mark.parametrize(("end", "expected"), [("x", 9), (".", 8), ("xx", 10), ("x.", 10)])
    def test_earlier_chunks_count_whatever_is_cached(self, end: str, expected: int) -> None:
        rng = random.Random(7)
        for _ in range(20):
            cached = [rng.random() < 0.5 for _ in range(8)] + t(end)
            blocks, length = search(ChunkedLocalAttentionManager, self.spec, cached, 2 * len(cached) + 1)
            assert length == 2 * expected
            assert blocks[:8] == [0] * 8

    def test_alignment_may_lead_back_into_an_earlier_chunk(self) -> None:
        assert search(ChunkedLocalAttentionManager, self.spec, t("..x.xx"), 12, alignment=6) == ([0] * 6, 12)
        assert search(ChunkedLocalAttentionManager, self.spec, t("..xx."), 10, alignment=6) == ([0, 0, 12], 6)
        assert search(ChunkedLocalAttentionManager, self.spec, t("...x."), 10, alignment=6) == ([], 0)

    def test_drop_gives_the_last_block_back(self) -> None:
        assert search(ChunkedLocalAttentionManager, self.spec, t("xxx."), 8, drop=True) == ([0, 0], 4)
        assert search(ChunkedLocalAttentionManager, self.spec, t("xx.."), 8, drop=True) == ([10], 2)
        assert search(ChunkedLocalAttentionManager, self.spec, t("x..."), 8, drop=True) == ([], 0)


class TestMamba:
    def test_takes_the_last_state_and_nothing_else(self) -> None:
        assert search(MambaManager, mamba(4), t("x.x.."), 20) == ([0, 0, 12], 12)
        assert search(MambaManager, mamba(4), t("x.x.."), 11) == ([10], 4)
        assert search(MambaManager, mamba(4), t("....."), 20) == ([], 0)

    def test_pfx_01_a_state_is_never_rewound(self) -> None:
        assert search(MambaManager, mamba(4), t("xxxx"), 16, drop=True) == ([0, 0, 0, 13], 16)

    def test_ends_on_the_alignment(self) -> None:
        assert search(MambaManager, mamba(4), t("xxx"), 12, alignment=8) == ([0, 11], 8)

    def test_may_end_inside_a_block(self) -> None:
        cached = [False, True, True, False]  # states after 4 and after 6 tokens, blocks of 4
        assert search(MambaManager, mamba(4), cached, 8, alignment=2, hash_block=2) == ([0, 12], 6)
        assert search(MambaManager, mamba(4), cached, 5, alignment=2, hash_block=2) == ([11], 4)


def test_scratch_never_hits() -> None:
    assert search(CircularBufferManager, ring(4), t("xxx"), 12) == ([], 0)


def test_cross_attention_is_never_looked_up() -> None:
    with pytest.raises(RuntimeError, match="never looked up"):
        search(CrossAttentionManager, full(4), t("x"), 4)


@pytest.mark.parametrize(
    ("manager_class", "spec"),
    [(SlidingWindowManager, full(4)), (ChunkedLocalAttentionManager, full(4))],
)
def test_a_spec_of_another_kind_is_refused(manager_class, spec) -> None:
    with pytest.raises(TypeError, match="FullAttentionSpec"):
        search(manager_class, spec, t("x"), 4)


class TestMask:
    def mask(self, cls, start, end, alignment, spec, eagle=False, retention=None, boundaries=(), **more):
        got = cls.reachable_block_mask(start, end, alignment, spec, eagle, retention, boundaries, **more)
        return None if got is None else "".join("x" if m else "." for m in got)

    def test_kinds_that_need_everything_leave_nothing_out(self) -> None:
        assert self.mask(FullAttentionManager, 0, 4, 16, full(4), retention=0) is None
        assert self.mask(ChunkedLocalAttentionManager, 0, 4, 16, chunked(4, 8), retention=0) is None

    def test_dense_windows_keep_what_aligned_ends_need(self) -> None:
        spec = window(2, 4)
        assert self.mask(SlidingWindowManager, 0, 4, 2, spec) is None
        assert self.mask(SlidingWindowManager, 0, 4, 4, spec) is None
        assert self.mask(SlidingWindowManager, 0, 8, 8, spec) == "..xx..xx"
        assert self.mask(SlidingWindowManager, 3, 8, 8, spec) == "x..xx"
        assert self.mask(SlidingWindowManager, 0, 8, 8, spec, eagle=True) == "..xxx.xx"
        assert self.mask(SlidingWindowManager, 8, 10, 8, spec, eagle=True) == "x."

    def test_without_interval_only_boundaries_are_kept(self) -> None:
        spec = window(2, 4)
        assert self.mask(SlidingWindowManager, 0, 8, 2, spec, retention=0, boundaries=(9,)) == "..xx...."
        assert self.mask(SlidingWindowManager, 0, 8, 4, spec, retention=0, boundaries=(11,)) == "..xx...."
        assert self.mask(SlidingWindowManager, 0, 4, 2, spec, retention=0, boundaries=(0,)) == "...."
        assert (
            self.mask(SlidingWindowManager, 0, 4, 2, spec, eagle=True, retention=0, boundaries=(4,)) == "xxx."
        )
        assert self.mask(MambaManager, 0, 4, 2, mamba(2), retention=0, boundaries=(7, 2)) == "x.x."

    def test_with_interval_its_multiples_are_kept_too(self) -> None:
        assert self.mask(MambaManager, 0, 8, 2, mamba(2), retention=6, boundaries=(15,)) == "..x..xx."
        assert self.mask(SlidingWindowManager, 2, 8, 2, window(2, 2), retention=8) == ".x...x"

    def test_dense_states_are_all_kept(self) -> None:
        assert self.mask(MambaManager, 0, 4, 2, mamba(2)) is None
        assert self.mask(MambaManager, 0, 4, 4, mamba(2)) == ".x.x"

    def test_a_further_end_can_be_named(self) -> None:
        got = self.mask(MambaManager, 0, 4, 2, mamba(2), retention=0, final_segment_end_block=4)
        assert got == "...x"
