"""Memory as stamps: every slot holds the fingerprint of the exact prefix that belongs there.

"Compute" writes stamps through the block table, "attention" reads every slot that the kind declares visible and
compares. So *hit ⇒ bytes equal* is checked at every read, and it does not matter why a wrong byte got there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.sim.content import Chain, in_group
from tests.sim.failure import require
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    HiSparseHotSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

POISON = -1
NO_GROUP = -1


def versioned(stamp: int, version: int, shard: int = 0) -> int:
    """The stamp under the model's present weights; a full reset changes them, so that old bytes become wrong.

    Ranks that hold other heads hold other bytes.
    """
    return stamp ^ (version * 0x5DEECE66D) ^ (shard * 0x2545F4914F6CDD1D)


class Page:
    """The bytes of one block: whose rows they are, and the rows."""

    __slots__ = ("bad", "group", "slots", "tainted")

    def __init__(self) -> None:
        self.group = NO_GROUP
        self.slots: list[int] = []
        self.bad = False
        """The medium has lost these bytes, and copies that bring them upwards notice it."""
        self.tainted = False
        """An error made them suspect, or a reset withdrew them, which nobody can see of them."""

    @property
    def is_lost(self) -> bool:
        """Whoever reads these bytes notices that they are gone, so it is no harm if they are found."""
        return self.bad and not self.tainted

    def poison(self) -> None:
        """Make every row useless."""
        self.group = NO_GROUP
        self.slots = []

    def spoil(self) -> None:
        """Lose the bytes until others are written."""
        self.poison()
        self.bad = True

    def write(self, group: int, size: int, slot: int, stamp: int) -> None:
        """Write one row; rows of another group in this block are gone."""
        if self.group != group or len(self.slots) != size:
            self.group = group
            self.slots = [POISON] * size
        self.slots[slot] = stamp

    def read(self, group: int, slot: int) -> int:
        """One row as that group sees it."""
        return self.slots[slot] if self.group == group and slot < len(self.slots) else POISON

    def copy_slot(self, source: Page, slot: int) -> None:
        """Take over one row of another page, whatever group it is of."""
        self.bad = self.tainted = False
        if self.group != source.group or len(self.slots) != len(source.slots):
            self.group = source.group
            self.slots = [POISON] * len(source.slots)
        if slot < len(source.slots):
            self.slots[slot] = source.slots[slot]

    def copy(self, source: Page) -> None:
        """Take over all rows at once."""
        self.group = source.group
        self.slots = list(source.slots)


class Memory:
    """One tier's memory on one rank."""

    def __init__(self, num_blocks: int) -> None:
        self.pages = [Page() for _ in range(num_blocks)]

    def page(self, block_id: int) -> Page:
        """The page of a block."""
        return self.pages[block_id]

    def page_of(self, slots: Sequence[int], group: int) -> Page:
        """The page in which this rank has a group's content of a block, which takes these slots."""
        del group
        return self.page(slots[0])


@dataclass
class Rows:
    """The request's side of one forward: its tokens, what is computed, and its block tables per group."""

    request_id: str
    chain: Chain
    tables: list[list[int]]
    start: int
    end: int
    replay_start: int = 0
    replay_end: int = 0
    version: int = 0
    trusted: bool = True
    """False: the result is void already, so what it reads does not matter."""
    shadowed: bool = False
    """Scheduled while a step that fails was ahead: it may read what that step should have written. Its result is then
    nonsense, as on a real device, and the scheduler must not let anybody see it."""
    void: bool = False
    drafts: list[int] = field(default_factory=list)
    """The last tokens of `chain`, which are only tried."""
    prompt_end: int = 0
    """Tokens of the prompt."""
    encoder: tuple[int, ...] = ()
    """What the encoder has said of the request's input, by position."""
    encodes: bool = False
    """The encoder runs in this step."""
    counted_end: int = 0
    """`end` as the scheduler counts, which takes drafts under way for accepted: so it chose the column of a state."""
    state_end: int = 0
    """`counted_end` of the step that left the state from which this one goes on."""
    state_row: int = 0
    """How many of that step's drafts were accepted: in which of its rows that state is."""

    @property
    def known_end(self) -> int:
        """Where the tokens end that are not only tried."""
        return self.end - len(self.drafts)

    def stamp(self, group: int, num_tokens: int, shard: int) -> int:
        """What a group must hold for the prefix of that many tokens."""
        if self.void:
            return POISON
        return versioned(in_group(self.chain.prints[num_tokens], group), self.version, shard)

    def block(self, group: int, index: int) -> int:
        """Block id in the table of a group; 0 where the table has none."""
        table = self.tables[group]
        return table[index] if index < len(table) else 0


@dataclass(frozen=True)
class Context:
    """The share of a rank where ranks split the context: every `ranks`-th position from `rank` on."""

    rank: int = 0
    ranks: int = 1

    def has(self, position: int) -> bool:
        """Whether the rank holds the row of this position."""
        return position % self.ranks == self.rank


NO_SPLIT = Context()


class Group:
    """How one kind uses its blocks on one rank. Subclasses say what is written and what may be read."""

    shard = 0
    """Which of the different bytes of its layers the rank holds."""
    layer = 0
    num_layers = 1
    """Of the layers whose rows lie in a page one after the other, and which of them this is."""

    def __init__(self, group_id: int, spec: KVCacheSpec, context: Context) -> None:
        self.group_id = group_id
        self.spec = spec
        self.context = context if spec.dcp_sharded else NO_SPLIT
        self.block_size = spec.block_size * self.context.ranks
        self.cacheable = spec.prefix_cacheable

    @property
    def kind(self) -> Group:
        """Of a group of several layers one of them, else the group itself."""
        return self

    @property
    def rows_per_layer(self) -> int:
        """Of a page."""
        return self.block_size

    @property
    def page_rows(self) -> int:
        """Those of all its layers."""
        return self.rows_per_layer * self.num_layers

    def holds(self, shard: int) -> None:
        """Of the different bytes of its layers, the rank holds these."""
        self.shard = shard

    def is_layer(self, layer: int, num_layers: int) -> None:
        """Its rows are those of one layer among several."""
        self.layer, self.num_layers = layer, num_layers

    def before(self, memory: Memory, rows: Rows) -> None:
        """Reads that happen before anything is written."""

    def write(self, memory: Memory, rows: Rows) -> None:
        """The rows that the forward leaves behind."""

    def read(self, memory: Memory, rows: Rows) -> None:
        """Reads of the queries, after all writes of the step."""

    def accept(self, memory: Memory, rows: Rows, num_accepted: int) -> None:
        """What happens once it is known how many drafts were right."""

    def let_go(self, prompt_end: int, end: int) -> range:
        """Columns in the middle of a request of `end` tokens whose blocks it does not hold any more."""
        return range(0)

    def expected_page(self, prints: Sequence[int], version: int) -> dict[int, int]:
        """Slot → stamp of the cached block that ends with the last of these prefixes (or in the middle of it)."""
        end = len(prints) - 1
        start = (end - 1) // self.block_size * self.block_size
        return {
            self._row(p - start): self._of_layer(
                versioned(in_group(prints[p + 1], self.group_id), version, self.shard)
            )
            for p in range(start, end)
            if self.context.has(p)
        }

    def _row(self, slot: int) -> int:
        """Where in a page the layer has its row for a slot."""
        return self.layer * self.rows_per_layer + slot

    def _of_layer(self, stamp: int) -> int:
        """Layers hold different bytes."""
        return stamp if stamp == POISON else stamp ^ (self.layer * 0x9E3779B1)

    def _put(self, memory: Memory, block: int, slot: int, stamp: int) -> None:
        """Write the layer's row for a slot."""
        memory.page(block).write(self.group_id, self.page_rows, self._row(slot), self._of_layer(stamp))

    def _expect(self, memory: Memory, rows: Rows, block: int, slot: int, num_tokens: int) -> None:
        stamp = rows.stamp(self.group_id, num_tokens, self.shard)
        self._compare(memory, rows, (block, slot), stamp, f"token {num_tokens - 1}")

    def _compare(self, memory: Memory, rows: Rows, at: tuple[int, int], stamp: int, what_for: str) -> None:
        block, slot = at
        got = memory.page(block).read(self.group_id, self._row(slot)) if block else POISON
        if rows.void or not rows.trusted or got == self._of_layer(stamp):
            return
        if rows.shadowed:
            rows.void = True
            return
        where = f"block {block} slot {slot} of group {self.group_id} ({type(self.spec).__name__})"
        what = "null block" if block == 0 else ("poison" if got == POISON else "another prefix")
        require(
            False,
            "I6",
            f"{rows.request_id} computes [{rows.start}, {rows.end}) and reads {what} for {what_for} in {where}",
        )


class RowGroup(Group):
    """One row per token, in the block of its position; full attention."""

    def first_visible(self, rows: Rows) -> int:
        """The first position that some query of the step reads."""
        return 0

    def write(self, memory: Memory, rows: Rows) -> None:
        start = rows.start
        if self.cacheable:  # rows below the cached end are replayed for windows only and stay as they are
            start = max(start, rows.replay_end)
        for position in range(start, rows.end):
            block = rows.block(self.group_id, position // self.block_size)
            if block == 0 or not self.context.has(position):
                continue
            stamp = rows.stamp(self.group_id, position + 1, self.shard)
            self._put(memory, block, position % self.block_size, stamp)

    def read(self, memory: Memory, rows: Rows) -> None:
        for position in range(self.first_visible(rows), rows.end):
            if not self.context.has(position):
                continue
            block = rows.block(self.group_id, position // self.block_size)
            self._expect(memory, rows, block, position % self.block_size, position + 1)


class WindowGroup(RowGroup):
    """Reads the last tokens only; with bounded replay nothing before the replay's start."""

    def first_visible(self, rows: Rows) -> int:
        spec = self.spec
        assert isinstance(spec, SlidingWindowSpec)
        first = max(0, rows.start - spec.sliding_window + 1)
        return first if self.cacheable else max(first, rows.replay_start)


class ChunkGroup(RowGroup):
    """Reads its own chunk."""

    def first_visible(self, rows: Rows) -> int:
        spec = self.spec
        assert isinstance(spec, ChunkedLocalAttentionSpec)
        return rows.start // spec.attention_chunk_size * spec.attention_chunk_size


class StateGroup(Group):
    """One state per block: read at the chunk's start, written at its end, never changed in between.

    A step with drafts leaves a state after each of them: the one after the known tokens in the column of the step's
    end, those after the drafts in the columns behind it, whatever their positions. The next step goes on from the row
    of the last draft that was accepted; a state at a block's end that was passed is brought to its own column.
    """

    @property
    def rows_per_layer(self) -> int:
        return 1

    def before(self, memory: Memory, rows: Rows) -> None:
        if rows.start > 0:
            block = rows.block(self.group_id, self._column(rows.state_end) + rows.state_row)
            self._expect(memory, rows, block, 0, rows.start)

    def write(self, memory: Memory, rows: Rows) -> None:
        for row in range(1 + len(rows.drafts)):
            num_tokens = rows.known_end + row
            block = rows.block(self.group_id, self._column(rows.counted_end) + row)
            require(
                block != 0, "I6", f"{rows.request_id} has no block for its state after {num_tokens} tokens"
            )
            self._put(memory, block, 0, rows.stamp(self.group_id, num_tokens, self.shard))

    def accept(self, memory: Memory, rows: Rows, num_accepted: int) -> None:
        for row in range(1 + num_accepted):
            num_tokens, column = rows.known_end + row, self._column(rows.counted_end) + row
            target = rows.block(self.group_id, self._column(num_tokens))
            if num_tokens % self.block_size or not target or column == self._column(num_tokens):
                continue
            state = memory.page(rows.block(self.group_id, column)).read(self.group_id, self._row(0))
            memory.page(target).write(self.group_id, self.page_rows, self._row(0), state)

    def _column(self, num_tokens: int) -> int:
        return (num_tokens - 1) // self.block_size

    def expected_page(self, prints: Sequence[int], version: int) -> dict[int, int]:
        stamp = versioned(in_group(prints[-1], self.group_id), version, self.shard)
        return {self._row(0): self._of_layer(stamp)}


class RingGroup(Group):
    """Rows of the group of tokens that is still open, at position modulo capacity; read before written."""

    ratio = 1
    """Tokens of a group."""

    def write(self, memory: Memory, rows: Rows) -> None:
        block = rows.block(self.group_id, 0)
        require(block != 0, "I6", f"{rows.request_id} has no ring block")
        require(len(rows.tables[self.group_id]) == 1, "I6", f"{rows.request_id} has more than one ring block")
        for position in range(rows.start, rows.end):
            for earlier in range(position // self.ratio * self.ratio, position):
                self._expect(memory, rows, block, earlier % self.block_size, earlier + 1)
            stamp = rows.stamp(self.group_id, position + 1, self.shard)
            self._put(memory, block, position % self.block_size, stamp)


class ResidentGroup(RowGroup):
    """Rows of the tokens in flight, which lie elsewhere once they are computed; what was cached is not written again."""

    def first_visible(self, rows: Rows) -> int:
        return max(rows.start, rows.replay_end)

    def write(self, memory: Memory, rows: Rows) -> None:
        for position in range(self.first_visible(rows), rows.end):
            block = rows.block(self.group_id, position // self.block_size)
            require(block != 0, "I6", f"{rows.request_id} has no block for its token {position}")
        super().write(memory, rows)


class HotGroup(Group):
    """A fixed share of blocks that the request fills in every step.

    Its rows say whose they are, not what: equal requests must not share either, and it is theirs with nonsense too.
    """

    def write(self, memory: Memory, rows: Rows) -> None:
        spec, table = self.spec, rows.tables[self.group_id]
        assert isinstance(spec, HiSparseHotSpec)
        require(
            len(table) == spec.blocks_per_request and 0 not in table,
            "I6",
            f"{rows.request_id} has scratch {table}, expected {spec.blocks_per_request} blocks",
        )
        for index, block in enumerate(table):
            memory.page(block).write(self.group_id, 1, 0, self._owner(rows, index))

    def read(self, memory: Memory, rows: Rows) -> None:
        for index, block in enumerate(rows.tables[self.group_id]):
            got = memory.page(block).read(self.group_id, 0)
            require(
                got == self._owner(rows, index),
                "I6",
                f"{rows.request_id} shares block {block} of its scratch",
            )

    @staticmethod
    def _owner(rows: Rows, index: int) -> int:
        return int.from_bytes(f"{rows.request_id} {index}".encode())


def forward(memory: Memory, groups: Sequence[Group], batch: Sequence[Rows]) -> None:
    """One step on one rank: initial states, then all writes, then all reads."""
    for group in groups:
        for rows in batch:
            group.before(memory, rows)
    for group in groups:
        for rows in batch:
            group.write(memory, rows)
    for group in groups:
        for rows in batch:
            group.read(memory, rows)
    spoil(memory, groups, batch)


def spoil(memory: Memory, groups: Sequence[Group], batch: Sequence[Rows]) -> None:
    """What was computed from nonsense is nonsense, and so is what was computed from that in the same step."""
    spoilt = {rows.request_id for rows in batch if rows.void}
    while spoilt:
        for group in groups:
            for rows in batch:
                if rows.void:
                    group.write(memory, rows)
        for group in groups:
            for rows in batch:
                if not rows.void:
                    group.read(memory, rows)
        now = {rows.request_id for rows in batch if rows.void}
        if now == spoilt:
            return
        spoilt = now
