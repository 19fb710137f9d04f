"""Drives a model over pages without the engine: a small scheduler that tests can steer.

All caches live in one pool of blocks with shuffled ids; free blocks are poisoned with NaN bytes, so that a read of
anything that was not written shows at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from vllm.model_executor.models.interfaces import NativeModel
from vllm.v1.attention.backend import GroupMeta, StepMeta
from vllm.v1.attention.backends.mla.indexer import ring_slot_mapping
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

Value = TypeVar("Value")

PAGED, RING, STATE, WINDOW = "paged", "ring", "state", "window"


def group_kind(spec: KVCacheSpec) -> str:
    if isinstance(spec, CircularBufferSpec):
        return RING
    if isinstance(spec, MambaSpec):
        return STATE
    return WINDOW if isinstance(spec, SlidingWindowSpec) else PAGED


@dataclass
class Running:
    """A request: its tokens, how many are computed, its block table per group kind."""

    tokens: list[int]
    computed: int = 0
    tables: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Prefix:
    """Blocks that hold exactly `tokens`; held until the harness ends."""

    tokens: list[int]
    tables: dict[str, list[int]]


class PagedHarness:
    """`step` runs a mixed batch and returns each request's logits for its new tokens."""

    def __init__(self, model: NativeModel, num_blocks: int = 256, seed: int = 0) -> None:
        self.model = model
        self.rng = random.Random(seed)
        self.specs = model.kv_specs()
        self.kinds = {name: group_kind(spec) for name, spec in self.specs.items()}
        self.block_sizes = {self.kinds[name]: spec.block_size for name, spec in self.specs.items()}
        # One allocation, a page of every cache side by side in each block: raw views are strided.
        offsets, width = {}, 0
        for name, spec in self.specs.items():
            offsets[name] = width
            width += -(-spec.page_size_bytes // 64) * 64
        self.memory = torch.full((num_blocks, width), -1, dtype=torch.int8)
        self.raw = {n: self.memory[:, o : o + self.specs[n].page_size_bytes] for n, o in offsets.items()}
        self.sharing = model.kv_sharing()
        model.bind_kv_caches(self._with_sharing(self.raw), self._with_sharing(self.specs))
        self.free = list(range(1, num_blocks))
        self.rng.shuffle(self.free)
        self.shared: set[int] = set()
        self.prefixes: list[Prefix] = []

    def _with_sharing(self, values: dict[str, Value]) -> dict[str, Value]:
        """Caches that share another one get what that one has."""
        return values | {name: values[owner] for name, owner in self.sharing.items()}

    def null_is_clean(self) -> bool:
        """Whether nothing was ever written to the null block."""
        return bool((self.memory[0] == -1).all())

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            if block and block not in self.shared:
                self.memory[block] = -1
                self.free.insert(self.rng.randrange(len(self.free) + 1), block)

    def preempt(self, request: Running) -> None:
        """Takes all blocks away."""
        for table in request.tables.values():
            self.release(table)
        request.tables, request.computed = {}, 0

    def share(self, request: Running) -> None:
        """Remembers the request's prefix, if it ends on a block boundary of every group that can be shared."""
        size = self.block_sizes.get(STATE) or self.block_sizes.get(PAGED) or self.block_sizes[WINDOW]
        length = request.computed
        if length == 0 or length % size:
            return
        tables = {k: list(t[: length // self.block_sizes[k]]) for k, t in request.tables.items() if k != RING}
        for kind, table in tables.items():
            if kind == STATE:
                tables[kind] = [0] * (len(table) - 1) + table[-1:]
            self.shared.update(tables[kind])
        self.prefixes.append(Prefix(request.tokens[:length], tables))

    def start(self, tokens: list[int], use_prefix: bool = True) -> Running:
        """A new request, starting behind the longest remembered prefix (less than all of its tokens)."""
        request = Running(list(tokens))
        for prefix in self.prefixes if use_prefix else []:
            n = len(prefix.tokens)
            if request.computed < n < len(tokens) and tokens[:n] == prefix.tokens:
                request.computed = n
                request.tables = {k: list(t) for k, t in prefix.tables.items()}
        return request

    def _grow(self, request: Running, length: int) -> None:
        for kind, size in self.block_sizes.items():
            table = request.tables.setdefault(kind, [])
            wanted = 1 if kind == RING else -(-length // size)
            if kind != STATE:
                while len(table) < wanted:
                    table.append(self.free.pop())
                continue
            table.extend([0] * (wanted - len(table)))
            if table[wanted - 1] == 0:
                table[wanted - 1] = self.free.pop()

    def _drop_old(self, request: Running) -> None:
        """Frees states before the current one and, of window groups, blocks that no later token can read."""
        if STATE in request.tables:
            table = request.tables[STATE]
            last = (request.computed - 1) // self.block_sizes[STATE]
            for i in range(last):
                self.release([table[i]])
                table[i] = 0
        if WINDOW in request.tables:
            window = next(s.sliding_window for s in self.specs.values() if isinstance(s, SlidingWindowSpec))
            table = request.tables[WINDOW]
            for i in range(max(0, request.computed - window + 1) // self.block_sizes[WINDOW]):
                self.release([table[i]])
                table[i] = 0

    def step(self, batch: list[tuple[Running, int]]) -> list[torch.Tensor]:
        """Runs the next `n` tokens of each request; logits `[n, vocab]` per entry of `batch`, in its order."""
        for request, count in batch:
            self._grow(request, request.computed + count)
        order = sorted(range(len(batch)), key=lambda i: not (batch[i][1] == 1 and batch[i][0].computed > 0))
        rows = [batch[i] for i in order]
        meta = self.metadata(rows)
        ids = [
            t for request, count in rows for t in request.tokens[request.computed : request.computed + count]
        ]
        with torch.inference_mode():
            hidden = self.model.forward(torch.tensor(ids), meta.positions, meta)
            logits = self.model.compute_logits(hidden)
        results: list[torch.Tensor] = [torch.empty(0)] * len(batch)
        for i, part in zip(order, logits.split(meta.query_lens), strict=True):
            results[i] = part
        for request, count in rows:
            request.computed += count
            self._drop_old(request)
        return results

    def metadata(self, rows: list[tuple[Running, int]]) -> StepMeta:
        """The step's metadata; rows are in decode-first order."""
        counts = [count for _, count in rows]
        contexts = [request.computed for request, _ in rows]
        positions = torch.cat([torch.arange(c, c + n) for c, n in zip(contexts, counts, strict=True)])
        row_of = torch.arange(len(rows)).repeat_interleave(torch.tensor(counts))
        by_kind = {}
        for kind, size in self.block_sizes.items():
            width = max(len(request.tables[kind]) for request, _ in rows)
            table = torch.zeros(len(rows), width + 1, dtype=torch.int32)
            for r, (request, _) in enumerate(rows):
                table[r, : len(request.tables[kind])] = torch.tensor(request.tables[kind], dtype=torch.int32)
            slots = None
            if kind == RING:
                slots = ring_slot_mapping(table, row_of, positions, size)
            elif kind != STATE:
                slots = table[row_of, positions // size].to(torch.int64) * size + positions % size
            by_kind[kind] = GroupMeta(size, table, slots)
        num_decodes = 0
        while num_decodes < len(rows) and counts[num_decodes] == 1 and contexts[num_decodes] > 0:
            num_decodes += 1
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        return StepMeta(
            num_reqs=len(rows),
            num_tokens=sum(counts),
            query_start=starts,
            query_lens=counts,
            context_lens=contexts,
            seq_lens=[c + n for c, n in zip(contexts, counts, strict=True)],
            positions=positions,
            num_decodes=num_decodes,
            groups=self._with_sharing({name: by_kind[kind] for name, kind in self.kinds.items()}),
            replay_starts=[0] * len(rows),
        )
