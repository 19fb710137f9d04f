"""The pooled-key indexer: which tokens a latent-attention layer may read.

Owns: pooling of complete groups of `r` tokens, the ring of raw rows of the open group, scoring and selection.
Must not know: the attention that uses the selection. Layer L6.

Group j holds the tokens `[j·r, (j+1)·r)`; its pooled key exists once its last token has been seen. A token at position
p scores the groups that are complete at p, keeps the best `topk / r` (of equals the lowest wins) and always reads the
open group's tokens up to itself. With no more complete groups than that, everything is selected and nothing is scored.

Rows of a group that began before this chunk come from the ring, so a chunk may start anywhere the ring still covers;
the ring is read before this chunk's rows overwrite it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.linear import Linear, StackedLinear, frozen
from vllm.model_executor.layers.sharding import Slot
from vllm.v1.attention.backend import StepMeta
from vllm.v1.attention.pages import RingPages, RowPages, ring_slots, slots_of

__all__ = ["IndexerShape", "KpoolIndexer", "PoolPlan", "Selection", "ring_capacity", "stable_topk_mask"]

# Per request of the step: bool [query, seq_len], or None where every earlier token may be read.
Selection = list[Tensor | None]

# Scores are computed for this many (token, head, group) triples at a time.
_SCORES_MAX = 1 << 25


def ring_capacity(pool: int, num_speculative_tokens: int) -> int:
    """Rows of the ring: a rejected draft must not overwrite a row that an open group still needs."""
    groups = -(-(pool + num_speculative_tokens) // pool)
    return pool * (1 << (groups - 1).bit_length())


def stable_topk_mask(scores: Tensor, valid: Tensor, k: int) -> Tensor:
    """The k best valid entries per row as a mask; of equal scores the lowest index wins."""
    scores = scores.masked_fill(~valid, float("-inf"))
    k = min(k, scores.shape[-1])
    least = scores.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above = scores > least
    ties = scores == least
    room = k - above.sum(-1, keepdim=True)
    return (above | (ties & (ties.cumsum(-1) <= room))) & valid


@dataclass(slots=True)
class PoolPlan:
    """The groups that this step completes: where their r rows are and where their pooled key goes.

    `tokens [G, r]`: index into the step's tokens, −1 where the row is in the ring at `ring_rows [G, r]` of block
    `ring_blocks [G]`. `targets [G]`: row slots of the pooled keys. The same for all layers of a step.
    """

    tokens: Tensor
    from_ring: Tensor
    ring_blocks: Tensor
    ring_rows: Tensor
    targets: Tensor

    @staticmethod
    def of_step(meta: StepMeta, key_cache: str, ring_cache: str, pool: int) -> PoolPlan:
        """Built once per step; `ValueError` if a row is needed that neither the step nor a ring holds."""
        key_group, ring_group = meta.groups[key_cache], meta.groups[ring_cache]
        key = f"pool:{id(key_group)}:{id(ring_group)}"
        found = meta.derived.get(key)
        if found is None:
            counts = torch.tensor(meta.query_lens, dtype=torch.int64)
            rows = torch.arange(meta.num_reqs).repeat_interleave(counts)
            slots = slots_of(key_group)
            # A group is pooled by its last token, unless that token's slot says that its bytes are cached already.
            ends = ((meta.positions % pool == pool - 1) & (slots >= 0)).nonzero().flatten()
            back = torch.arange(pool - 1, -1, -1)
            tokens = ends[:, None] - back
            from_ring = tokens < meta.query_start.to(torch.int64)[rows[ends]][:, None]
            ring_blocks = ring_group.block_table[rows[ends], 0].to(torch.int64)
            if bool((from_ring.any(-1) & (ring_blocks == 0)).any()):
                raise ValueError(
                    f"cache {ring_cache}: a chunk starts inside a group of {pool} tokens whose rows are not in a ring;"
                    " resume the request at an aligned position"
                )
            ring_rows = (meta.positions[ends][:, None] - back) % ring_group.block_size
            targets = torch.div(slots[ends], pool, rounding_mode="floor")
            found = PoolPlan(tokens.clamp(min=0), from_ring, ring_blocks, ring_rows, targets)
            meta.derived[key] = found
        result: PoolPlan = found
        return result


@dataclass(frozen=True, slots=True)
class IndexerShape:
    """Sizes of one indexer; `topk` in tokens, a multiple of `pool`."""

    hidden_size: int
    q_rank: int
    num_heads: int
    head_dim: int
    topk: int
    pool: int
    dtype: torch.dtype


class KpoolIndexer(nn.Module):
    """Writes this step's pooled keys and ring rows, then selects for each token what it may read."""

    def __init__(self, shape: IndexerShape, keys: RowPages, ring: RingPages) -> None:
        super().__init__()
        self.shape = shape
        self.keys = keys
        self.ring = ring
        d, h, dtype = shape.head_dim, shape.num_heads, shape.dtype
        self.query = Linear(shape.q_rank, h * d, dtype)
        # From x: raw key, gate score per channel, weight per head.
        self.narrow = StackedLinear(shape.hidden_size, [d, d, h], dtype)
        self.key_norm = LayerNorm(d, 1e-6, dtype)
        self.position_bias = frozen(shape.pool, d, dtype=torch.float32)

    def forward(self, x: Tensor, q_low: Tensor, meta: StepMeta) -> Selection:
        """`x [T, D]` and the normed low-rank queries `[T, q_rank]` → the selection of every request."""
        key, gate, weights = self.narrow.split(self.narrow.forward(x))
        key = self.key_norm.forward(key)
        plan = PoolPlan.of_step(meta, self.keys.cache_name, self.ring.cache_name, self.shape.pool)
        if plan.targets.numel():
            self.keys.write(self._pool(key, gate, plan), plan.targets)
        self.ring.write((key, gate), ring_slots(meta, meta.groups[self.ring.cache_name]))
        return self._select(q_low, weights, meta)

    def _pool(self, key: Tensor, gate: Tensor, plan: PoolPlan) -> Tensor:
        """Pooled keys `[G, d]`: per channel a softmax over the group's gate scores plus position bias."""
        rows = torch.stack([key, gate])[:, plan.tokens].to(self.ring.dtype)
        if bool(plan.from_ring.any()):
            held = self.ring.pages[plan.ring_blocks[:, None], :, plan.ring_rows].permute(2, 0, 1, 3)
            rows = torch.where(plan.from_ring[..., None], held, rows)
        keys, gates = rows.float()
        weights = (gates + self.position_bias).softmax(1)
        return (weights * keys).sum(1)

    def _select(self, q_low: Tensor, weights: Tensor, meta: StepMeta) -> Selection:
        shape = self.shape
        limit = shape.topk // shape.pool
        selection: Selection = [None] * meta.num_reqs
        start = 0
        for r, count in enumerate(meta.query_lens):
            if meta.seq_lens[r] // shape.pool > limit:
                end = start + count
                selection[r] = self._select_row(q_low[start:end], weights[start:end], meta, r)
            start += count
        return selection

    def _select_row(self, q_low: Tensor, weights: Tensor, meta: StepMeta, r: int) -> Tensor:
        """The selection of one request, bool `[query, seq_len]`."""
        shape = self.shape
        length, context = meta.seq_lens[r], meta.context_lens[r]
        table = meta.groups[self.keys.cache_name].block_table[r]
        pooled = self.keys.gather(table, length // shape.pool).float().T
        queries = self.query.forward(q_low).view(-1, shape.num_heads, shape.head_dim).float()
        head_weights = weights.float() * shape.num_heads**-0.5
        mask = torch.zeros(queries.shape[0], length, dtype=torch.bool)
        step = max(1, _SCORES_MAX // (shape.num_heads * pooled.shape[1]))
        for low in range(0, queries.shape[0], step):
            part = queries[low : low + step]
            positions = torch.arange(context + low, context + low + part.shape[0])[:, None]
            scores = F.relu(torch.matmul(part, pooled) * shape.head_dim**-0.5)
            scores = torch.matmul(head_weights[low : low + step].unsqueeze(1), scores).squeeze(1)
            complete = torch.div(positions + 1, shape.pool, rounding_mode="floor")
            valid = torch.arange(pooled.shape[1])[None, :] < complete
            groups = stable_topk_mask(scores, valid, shape.topk // shape.pool)
            tokens = mask[low : low + step]
            tokens[:, : groups.shape[1] * shape.pool] = groups.repeat_interleave(shape.pool, dim=1)
            keys = torch.arange(length)[None, :]
            tokens |= (keys >= complete * shape.pool) & (keys <= positions)
        return mask

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.query.weight_slots(f"{prefix}.wq_b")
        key, gate, weights = self.narrow.weight.split(self.narrow.parts)
        yield f"{prefix}.wk.weight", key
        yield f"{prefix}.index_kpool_compress_gate", gate
        yield f"{prefix}.weights_proj.weight", weights
        yield from self.key_norm.weight_slots(f"{prefix}.k_norm")
        yield f"{prefix}.index_kpool_compress_ape", self.position_bias
