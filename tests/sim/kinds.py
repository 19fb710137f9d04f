"""Every kind of KV cache that the registry knows: what the device does for it, and into which worlds it comes.

A kind without a line in `MODELS` cannot be simulated, and one that no seed draws is none that is tested: `test_kinds.py`
asks for both.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.sim.content import in_group
from tests.sim.device import (
    NO_SPLIT,
    ChunkGroup,
    Context,
    Group,
    HotGroup,
    Memory,
    ResidentGroup,
    RingGroup,
    RowGroup,
    Rows,
    StateGroup,
    WindowGroup,
    versioned,
)
from tests.sim.encoder import CrossGroup, EncoderOnlyGroup
from tests.sim.marks import Marks
from tests.sim.params import BEFORE_ALL_KINDS, SimParams
from tests.sim.planting import Mutant, replaced
from tests.sim.rng import Streams
from vllm.v1.core.kv_kinds.full import RSWAManager, SinkFullAttentionManager
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    replace_as,
)

_OTHER_FULL = 0.3
_OTHER_WINDOW = 0.25
_SEVERAL_LAYERS = 0.12


class PromptGroup(RowGroup):
    """Tokens of the answer read the prompt and a window that ends with them."""

    def read(self, memory: Memory, rows: Rows) -> None:
        spec = self.spec
        assert isinstance(spec, RSWASpec)
        window = max(0, rows.start - spec.rswa_window + 1)
        for position in range(rows.end):
            if rows.start >= rows.prompt_end and rows.prompt_end <= position < window:
                continue
            if self.context.has(position):
                block = rows.block(self.group_id, position // self.block_size)
                self._expect(memory, rows, block, position % self.block_size, position + 1)

    def let_go(self, prompt_end: int, end: int) -> range:
        spec = self.spec
        assert isinstance(spec, RSWASpec)
        return range(-(-prompt_end // self.block_size), (end - spec.rswa_window + 1) // self.block_size)


class PooledGroup(RowGroup):
    """Several tokens share a row, which is written with the last of them from what a ring beside it has of the others."""

    @property
    def ratio(self) -> int:
        """Tokens of a row."""
        return int(self.spec.tokens_per_state)

    @property
    def rows_per_layer(self) -> int:
        return self.block_size // self.ratio

    def write(self, memory: Memory, rows: Rows) -> None:
        for end in self._ends(max(rows.start, rows.replay_end), rows.end):
            block, slot = rows.block(self.group_id, (end - 1) // self.block_size), self._slot(end)
            self._put(memory, block, slot, rows.stamp(self.group_id, end, self.shard))

    def read(self, memory: Memory, rows: Rows) -> None:
        for end in self._ends(0, rows.end):
            block = rows.block(self.group_id, (end - 1) // self.block_size)
            self._expect(memory, rows, block, self._slot(end), end)

    def expected_page(self, prints: Sequence[int], version: int) -> dict[int, int]:
        ends = self._ends((len(prints) - 2) // self.block_size * self.block_size, len(prints) - 1)
        stamps = {end: versioned(in_group(prints[end], self.group_id), version, self.shard) for end in ends}
        return {self._row(self._slot(end)): self._of_layer(stamp) for end, stamp in stamps.items()}

    def _ends(self, start: int, end: int) -> range:
        """Where rows end in `(start, end]`."""
        return range(start // self.ratio * self.ratio + self.ratio, end + 1, self.ratio)

    def _slot(self, end: int) -> int:
        return (end - 1) % self.block_size // self.ratio


class LayersGroup(Group):
    """Several layers with one block table: a page holds the rows of one after those of the other, and is copied whole."""

    def __init__(self, group_id: int, spec: UniformTypeKVCacheSpecs, members: Sequence[Group]) -> None:
        super().__init__(group_id, spec, members[0].context)
        self.members = members
        self.block_size = members[0].block_size
        self.num_layers = len(members)
        for layer, member in enumerate(members):
            member.is_layer(layer, len(members))

    @property
    def kind(self) -> Group:
        return self.members[0]

    @property
    def rows_per_layer(self) -> int:
        return self.kind.rows_per_layer

    def holds(self, shard: int) -> None:
        super().holds(shard)
        for member in self.members:
            member.holds(shard)

    def before(self, memory: Memory, rows: Rows) -> None:
        for member in self.members:
            member.before(memory, rows)

    def write(self, memory: Memory, rows: Rows) -> None:
        for member in self.members:
            member.write(memory, rows)

    def read(self, memory: Memory, rows: Rows) -> None:
        for member in self.members:
            member.read(memory, rows)

    def let_go(self, prompt_end: int, end: int) -> range:
        return self.kind.let_go(prompt_end, end)

    def accept(self, memory: Memory, rows: Rows, num_accepted: int) -> None:
        for member in self.members:
            member.accept(memory, rows, num_accepted)

    def expected_page(self, prints: Sequence[int], version: int) -> dict[int, int]:
        pages = [member.expected_page(prints, version) for member in self.members]
        return {row: stamp for page in pages for row, stamp in page.items()}


def _latent_rows(group_id: int, spec: KVCacheSpec, context: Context) -> Group:
    return (RowGroup if spec.tokens_per_state == 1 else PooledGroup)(group_id, spec, context)


MODELS: dict[type[KVCacheSpec], Callable[[int, KVCacheSpec, Context], Group]] = {
    FullAttentionSpec: RowGroup,
    MLAAttentionSpec: _latent_rows,
    HiddenStateCacheSpec: RowGroup,
    SinkFullAttentionSpec: RowGroup,
    RSWASpec: PromptGroup,
    SlidingWindowSpec: WindowGroup,
    SlidingWindowMLASpec: WindowGroup,
    ChunkedLocalAttentionSpec: ChunkGroup,
    CircularBufferSpec: RingGroup,
    MambaSpec: StateGroup,
    CrossAttentionSpec: CrossGroup,
    EncoderOnlyAttentionSpec: EncoderOnlyGroup,
    HiSparseHotSpec: HotGroup,
    HiSparseResidentSpec: ResidentGroup,
}
"""What a layer of exactly this kind does with its blocks."""


def make_groups(
    specs: Sequence[KVCacheSpec],
    ring_ratio: int,
    shards: Sequence[int] | None = None,
    context: Context = NO_SPLIT,
) -> list[Group]:
    """The kinds' use of memory, by group."""
    groups = [_make_group(group_id, spec, context) for group_id, spec in enumerate(specs)]
    for group, shard in zip(groups, shards or [0] * len(groups), strict=True):
        group.holds(shard)
        if isinstance(group, RingGroup):
            group.ratio = min(ring_ratio, group.spec.block_size)
    return groups


def _make_group(group_id: int, spec: KVCacheSpec, context: Context) -> Group:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        members = [MODELS[type(one)](group_id, one, context) for one in spec.kv_cache_specs.values()]
        return LayersGroup(group_id, spec, members)
    return MODELS[type(spec)](group_id, spec, context)


def with_other_kinds(params: SimParams) -> SimParams:
    """Rarer kinds in the place of others that need the same blocks, in some worlds; some groups get several layers whose
    pages differ. Drawn apart, and last, so that the other worlds stay.
    """
    if params.seed in BEFORE_ALL_KINDS:
        return params
    rng = Streams(params.seed).stream("other kinds")
    has_ring = any(isinstance(spec, CircularBufferSpec) for spec in params.specs)
    ratio = params.ring_ratio if has_ring and params.dcp == 1 else 1
    specs = tuple(_with_layers(_other_kind(spec, rng, ratio), rng, i) for i, spec in enumerate(params.specs))
    has_cross = any(isinstance(spec.kind_spec, CrossAttentionSpec) for spec in specs)
    return replace(params, specs=specs, encoder_tokens=params.encoder_tokens if has_cross else 0)


def _other_kind(spec: KVCacheSpec, rng: random.Random, ratio: int) -> KVCacheSpec:
    """`ratio`: tokens that may share a row."""
    if type(spec) is FullAttentionSpec and ratio > 1 and spec.block_size % ratio == 0 and rng.random() < 0.5:
        return replace_as(spec, MLAAttentionSpec, head_size_v=0, tokens_per_state=ratio)
    if type(spec) is FullAttentionSpec and rng.random() < _OTHER_FULL:
        kind, more = rng.choice(
            [
                (MLAAttentionSpec, {"head_size_v": 0}),
                (HiddenStateCacheSpec, {"head_size_v": 0}),
                (SinkFullAttentionSpec, {"sink_len": rng.choice((1, 2, 4))}),
                (SinkFullAttentionSpec, {"sink_len": spec.block_size}),
                (RSWASpec, {"rswa_window": rng.choice((1, 2, 3, 4))}),
                (RSWASpec, {"rswa_window": rng.choice((1, 2, 3))}),
            ]
        )
        return replace_as(spec, kind, **more)
    if type(spec) is SlidingWindowSpec and rng.random() < _OTHER_WINDOW:
        return replace_as(spec, SlidingWindowMLASpec, head_size_v=0)
    return spec


def _with_layers(spec: KVCacheSpec, rng: random.Random, group: int) -> KVCacheSpec:
    """The same cache in two or three layers of different width, with latent rows in some where the kind allows it."""
    fits = isinstance(spec, AttentionSpec | MambaSpec) and not isinstance(spec, CircularBufferSpec)
    if not fits or rng.random() >= _SEVERAL_LAYERS:
        return spec
    members = [spec, *(_wider(spec, n + 2) for n in range(rng.choice((1, 2))))]
    if type(spec) is FullAttentionSpec and rng.random() < 0.5:
        members[-1] = replace_as(spec, MLAAttentionSpec, head_size_v=0)
    uniform = UniformTypeKVCacheSpecs.from_specs(
        {f"layer{group}.{n}": member for n, member in enumerate(members)}
    )
    assert uniform is not None
    return uniform


def _wider(spec: KVCacheSpec, times: int) -> KVCacheSpec:
    if isinstance(spec, MambaSpec):
        return replace(spec, shapes=((8 * times,),))
    assert isinstance(spec, AttentionSpec)
    return replace(spec, head_size=2 * times)


def mark_kinds(marks: Marks, groups: Sequence[Group], batch: Sequence[Rows]) -> None:
    """What a step reached that concerns rarer kinds."""
    kinds = {type(group.spec.kind_spec) for group in groups}
    windows = [group for group in groups if isinstance(group.spec.kind_spec, SlidingWindowSpec)]
    inputs = Counter(rows.encoder for rows in batch if rows.encoder)
    if CrossAttentionSpec in kinds and len(batch) > inputs.total():
        marks.hit("no input for the encoder")
    if any(count > 1 for count in inputs.values()):
        marks.hit("encoder's output held twice")
    for rows in batch:
        if rows.encoder and not rows.encodes:
            marks.hit("encoder's output kept")
        if EncoderOnlyAttentionSpec in kinds:
            marks.hit("attention without a cache")
        if SinkFullAttentionSpec in kinds and any(_has_slid(group, rows) for group in windows):
            marks.hit("sinks stay while a window slides")
        if any(isinstance(group.kind, PooledGroup) for group in groups) and rows.start % 2:
            marks.hit("row shared with tokens of an earlier step")
        if any(group.let_go(rows.prompt_end, rows.start) for group in groups):
            marks.hit("blocks between prompt and window freed")


def _has_slid(group: Group, rows: Rows) -> bool:
    spec = group.spec.kind_spec
    assert isinstance(spec, SlidingWindowSpec)
    return rows.start >= spec.sliding_window + group.block_size


def layer_names(group: int, spec: KVCacheSpec) -> list[str]:
    """The layers of a group."""
    return list(spec.kv_cache_specs) if isinstance(spec, UniformTypeKVCacheSpecs) else [f"layer{group}"]


def _sinks_leave_like_a_window(original: Any) -> Any:
    """The first tokens are let go once a few more are computed."""
    del original
    return lambda self, num_computed_tokens: max(0, num_computed_tokens - 3)


def _prompt_leaves_with_the_window(original: Any) -> Any:
    """The window of the answer is taken for that of the whole request."""

    def remove(self: Any, request_id: str, num_computed: int, num_prompt_tokens: int | None = None) -> None:
        original(self, request_id, num_computed, num_prompt_tokens and 0)

    return remove


KIND_MUTANTS: dict[str, Mutant] = {
    "sinks leave like a window": replaced(
        SinkFullAttentionManager, "get_num_skipped_tokens", _sinks_leave_like_a_window
    ),
    "prompt leaves with the window": replaced(
        RSWAManager, "remove_skipped_blocks", _prompt_leaves_with_the_window
    ),
}
