"""The CPU attention path against the reference: block sizes, windows, bounded replay, head groupings, mixed steps."""

from __future__ import annotations

import random

import pytest
import torch

from vllm.v1.attention.backend import AttentionBackend, GroupMeta, StepMeta
from vllm.v1.attention.backends import cpu_attn, torch_ref
from vllm.v1.attention.backends.mla.indexer import KpoolTailBackend
from vllm.v1.attention.backends.registry import (
    AttentionBackendEnum,
    get_attention_backend,
    get_compute_backend,
    register_backend,
)
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.attention.pages import KVHeadPages, RowPages
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

BLOCKS = 900
# (tokens before the step, new tokens), decode rows first.
ROWS = [(1, 1), (16, 1), (37, 1), (600, 1), (0, 1), (0, 23), (5, 9), (16, 16), (40, 3)]


def make_step(block_size: int, seed: int, replay: dict[int, int] | None = None) -> tuple[StepMeta, GroupMeta]:
    """A step over shuffled blocks; block ids are unique, block 0 is left out."""
    rng = random.Random(seed)
    ids = list(range(1, BLOCKS))
    rng.shuffle(ids)
    contexts, queries = [c for c, _ in ROWS], [q for _, q in ROWS]
    width = max(-(-(c + q) // block_size) for c, q in ROWS) + 2
    table = torch.zeros(len(ROWS), width, dtype=torch.int32)
    for r, (context, query) in enumerate(ROWS):
        for b in range(-(-(context + query) // block_size)):
            table[r, b] = ids.pop()
    group = GroupMeta(block_size, table)
    meta = StepMeta(
        num_reqs=len(ROWS),
        num_tokens=sum(queries),
        query_start=torch.tensor([0, *queries]).cumsum(0).to(torch.int32),
        query_lens=queries,
        context_lens=contexts,
        seq_lens=[c + q for c, q in ROWS],
        positions=torch.cat([torch.arange(c, c + q) for c, q in ROWS]),
        num_decodes=4,
        groups={"layer": group},
        replay_starts=[(replay or {}).get(r, 0) for r in range(len(ROWS))],
    )
    return meta, group


def bound(pages: KVHeadPages | RowPages, page_bytes: int, group: GroupMeta) -> None:
    """Pages with random numbers in the blocks of the step and NaN elsewhere, as strided views."""
    memory = torch.full((BLOCKS, page_bytes + 64), -1, dtype=torch.int8)
    pages.bind_kv_cache(memory[:, 64:])
    for block in group.block_table.flatten().unique().tolist():
        if block:
            pages.pages[block] = torch.randn(pages.pages.shape[1:]).to(pages.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 7, 20, 1000])
def test_paged_attention(dtype: torch.dtype, block_size: int, window: int | None) -> None:
    meta, group = make_step(block_size, seed=block_size, replay={1: 8, 3: 595, 7: 10})
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=16, dtype=dtype)
    pages = KVHeadPages("layer", spec)
    bound(pages, spec.page_size_bytes, group)
    q = torch.randn(meta.num_tokens, 6, 16).to(dtype)
    inputs = (q, pages, meta, group, 0.25, window)
    expected = torch_ref.paged_attention_ref(*inputs)
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(cpu_attn.paged_attention(*inputs), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_latent_attention(block_size: int, is_sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    meta, group = make_step(block_size, seed=3)
    spec = MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=32, dtype=torch.float32)
    pages = RowPages("layer", spec)
    bound(pages, spec.page_size_bytes, group)
    selection: list[torch.Tensor | None] = [None] * len(ROWS)
    if is_sparse:
        for r, (context, query) in enumerate(ROWS):
            mask = torch_ref.visible_mask(context, query)
            keep = torch.rand(mask.shape) < 0.3
            keep[torch.arange(query), torch.arange(context, context + query)] = True
            selection[r] = mask & keep if r % 3 else None
    q = torch.randn(meta.num_tokens, 3, 32)
    inputs = (q, pages, meta, group, 0.2, selection)
    expected = torch_ref.latent_attention_ref(*inputs)
    torch.testing.assert_close(cpu_attn.latent_attention(*inputs), expected, atol=2e-5, rtol=2e-5)
    # Long prefills are worked off in slices; the slice length must not matter.
    monkeypatch.setattr(cpu_attn, "_SCORES_MAX", 100)
    torch.testing.assert_close(cpu_attn.latent_attention(*inputs), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("member", list(AttentionBackendEnum))
def test_registered_backends_answer_by_name(member: AttentionBackendEnum) -> None:
    backend = get_attention_backend(member.name.lower())
    assert backend.get_name() == member.name
    assert backend.supports_block_size(None)
    assert backend.supports_block_size(48)
    assert backend.supports_head_size(80)
    assert KVCacheLayout.BLHNC in backend.get_supported_kv_cache_layouts()


def test_unknown_and_malformed_backends_are_refused() -> None:
    with pytest.raises(ValueError, match="attention backend 'nope' is unknown; known: CPU_ATTN"):
        get_attention_backend("nope")
    with pytest.raises(ValueError, match="target must be 'module:Class'"):
        register_backend("mine", "module.Class")


def test_models_may_choose_a_computing_backend() -> None:
    assert get_compute_backend(None) is cpu_attn.CpuAttentionBackend
    assert get_compute_backend("torch_ref") is torch_ref.TorchRefBackend
    assert get_compute_backend(AttentionBackendEnum.CPU_ATTN) is cpu_attn.CpuAttentionBackend
    with pytest.raises(ValueError, match="attention_backend 'KPOOL_TAIL' only stores rows"):
        get_compute_backend("KPOOL_TAIL")


class OnlyLayerMajor(AttentionBackend):
    supported_kv_cache_layouts = (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_name() -> str:
        return "ONLY_LAYER_MAJOR"


def test_the_layout_is_one_that_all_backends_support() -> None:
    cpu = cpu_attn.CpuAttentionBackend
    assert resolve_kv_cache_layout([]) is KVCacheLayout.BLHNC
    assert resolve_kv_cache_layout([cpu, KpoolTailBackend]) is KVCacheLayout.BLHNC
    assert resolve_kv_cache_layout([cpu, OnlyLayerMajor]) is KVCacheLayout.LBHNC
    assert resolve_kv_cache_layout([cpu], KVCacheLayout.LBHNC) is KVCacheLayout.LBHNC
    with pytest.raises(ValueError, match="no KV cache layout in common: KPOOL_TAIL, ONLY_LAYER_MAJOR"):
        resolve_kv_cache_layout([KpoolTailBackend, OnlyLayerMajor])
    with pytest.raises(ValueError, match="LHBNC is not supported by all of: CPU_ATTN"):
        resolve_kv_cache_layout([cpu], KVCacheLayout.LHBNC)
