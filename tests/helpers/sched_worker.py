"""A fake worker: its memory holds stamps instead of numbers, and every read is checked.

The stamp of a position is a fingerprint of the exact token prefix up to it.  "Computing" a token writes its stamp
through the block table; "attending" reads every position the KV kind may read and compares.  The next token is a pure
function of the whole prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

VOCAB = 50
_MODULUS = (1 << 61) - 1
POISON = -1
"""Nothing was ever written here; reading it is an error."""
GARBAGE = -2
"""A load failed here and says so: what is computed from it is garbage too, and must never reach a client."""


def next_token(tokens: Sequence[int]) -> int:
    """The fake model."""
    return (fingerprints(tokens)[-1] >> 7) % VOCAB


def fingerprints(tokens: Sequence[int]) -> list[int]:
    """The stamp of every position."""
    stamps, value = [], 7
    for token in tokens:
        value = (value * 1_000_003 + token + 11) % _MODULUS
        stamps.append(value)
    return stamps


@dataclass
class Row:
    """What the worker knows of one request."""

    tokens: list[int]
    tables: list[list[int]]
    num_prompt: int = 0
    stamps: list[int] = field(default_factory=list)
    tainted: bool = False
    replay_start: int = 0
    num_drafts: int = 0
    """Of the last step."""
    state_end: int = 0
    state_row: int = 0
    """Where the last step ended, drafts included, and how many of them were right: there its last state is."""

    def stamp(self, position: int) -> int:
        if len(self.stamps) <= position:
            self.stamps = fingerprints(self.tokens)
        return self.stamps[position]


class FakeWorker:
    """Executes scheduler outputs in order.  `corrupt` names requests whose logits are not finite from now on."""

    def __init__(self, specs: Sequence[KVCacheSpec]) -> None:
        self.specs = list(specs)
        self.rows: dict[str, Row] = {}
        self.memory: dict[int, dict[int, int]] = {}
        self.corrupt: set[str] = set()
        self.connector_report: Callable[[SchedulerOutput], KVConnectorOutput | None] = lambda output: None
        self.before_forward: Callable[[SchedulerOutput], None] = lambda output: None
        self.checks = 0

    # --- one step ---------------------------------------------------------------------------------------------------

    def execute(self, output: SchedulerOutput, fails: bool = False) -> ModelRunnerOutput:
        """Run one step.  With `fails` everything it writes is garbage; the caller must not use the result."""
        for request_id in [*output.finished_req_ids, *(output.preempted_req_ids or ())]:
            self.rows.pop(request_id, None)
        for block in output.new_block_ids_to_zero or ():
            self.memory[block] = {}
        for source, target in output.kv_cache_block_copies or ():
            self.memory[target] = dict(self.memory.get(source, {}))
        for new in output.scheduled_new_reqs:
            self._add(new)
        self._extend(output.scheduled_cached_reqs)
        self.before_forward(output)
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        assert set(starts) == set(output.num_scheduled_tokens)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self._write_drafts(request_id, starts[request_id], num_tokens, output)
            row = self.rows[request_id]
            row.tainted = fails
            self._compute(row, starts[request_id], starts[request_id] + num_tokens)
        result = self._sample(output, starts)
        result.kv_connector_output = self.connector_report(output)
        return result

    def _add(self, new: NewRequestData) -> None:
        tokens = list(
            new.prefill_token_ids if new.prefill_token_ids is not None else new.prompt_token_ids or ()
        )
        self.rows[new.req_id] = Row(tokens, [list(ids) for ids in new.block_ids], new.prompt_len)
        self.rows[new.req_id].replay_start = new.replay_start
        self.rows[new.req_id].state_end = new.num_computed_tokens
        assert new.num_computed_tokens < len(tokens)

    def _extend(self, cached: CachedRequestData) -> None:
        for index, request_id in enumerate(cached.req_ids):
            row = self.rows[request_id]
            for table, ids in zip(row.tables, cached.new_block_ids[index] or (), strict=False):
                table.extend(ids)
            known = row.num_prompt + cached.num_output_tokens[index]
            assert known <= len(row.tokens), f"{request_id}: scheduler counts tokens the worker never sampled"
            if known < len(row.tokens):
                del row.tokens[known:]
                row.stamps = []

    def _write_drafts(self, request_id: str, start: int, num_tokens: int, output: SchedulerOutput) -> None:
        """Drafts are tokens whose ids are tried: the row holds them until they are refused."""
        drafts = output.scheduled_spec_decode_tokens.get(request_id)
        row = self.rows[request_id]
        row.num_drafts = len(drafts or ())
        if drafts:
            assert len(row.tokens) == start + num_tokens - len(drafts)
            row.tokens = [*row.tokens, *drafts]
            row.stamps = []
        assert start + num_tokens <= len(row.tokens), f"{request_id}: computes tokens that are not known"

    # --- memory -----------------------------------------------------------------------------------------------------

    def _compute(self, row: Row, start: int, end: int) -> None:
        for spec, table in zip(self.specs, row.tables, strict=True):
            if isinstance(spec, MambaSpec):
                self._advance_state(row, table, spec.block_size, start, end)
            elif isinstance(spec, CircularBufferSpec):
                self._fill_ring(row, table[0], spec.block_size, start, end)
            else:
                self._attend(row, table, spec, start, end)

    def _attend(self, row: Row, table: list[int], spec: KVCacheSpec, start: int, end: int) -> None:
        size = spec.block_size
        first = 0
        if isinstance(spec, SlidingWindowSpec):
            first = max(0, start - spec.sliding_window + 1)
            if not spec.prefix_cacheable:
                first = max(first, row.replay_start)  # what lies before a replay is not read
        for position in range(first, start):
            self._check(row, table[position // size], position % size, position)
        for position in range(start, end):
            self._write(row, table[position // size], position % size, position)

    def _advance_state(self, row: Row, table: list[int], size: int, start: int, end: int) -> None:
        """A state after the known tokens and one after each draft, in the columns from the step's end on."""
        if start > 0:
            self._check(row, table[(row.state_end - 1) // size + row.state_row], 0, start - 1)
        for draft in range(row.num_drafts + 1):
            self._write(row, table[(end - 1) // size + draft], 0, end - 1 - row.num_drafts + draft)

    def _accept(self, row: Row, end: int, num_accepted: int) -> None:
        """Bring states at block ends that were passed to their columns, and remember where the last one is."""
        for spec, table in zip(self.specs, row.tables, strict=True):
            if not isinstance(spec, MambaSpec):
                continue
            size = spec.block_size
            for draft in range(num_accepted + 1):
                num_tokens = end - row.num_drafts + draft
                target = table[(num_tokens - 1) // size]
                if num_tokens % size == 0 and target != 0:
                    self.memory[target] = dict(self.memory[table[(end - 1) // size + draft]])
        row.state_end, row.state_row = end, num_accepted

    def _fill_ring(self, row: Row, block: int, capacity: int, start: int, end: int) -> None:
        """Every fourth token reads the rows of its group back."""
        for position in range(start, end):
            self._write(row, block, position % capacity, position)
            if position % 4 == 3:
                for member in range(position - 3, position + 1):
                    self._check(row, block, member % capacity, member)

    def _write(self, row: Row, block: int, offset: int, position: int) -> None:
        assert block != 0, "something would be written into the null block"
        self.memory.setdefault(block, {})[offset] = GARBAGE if row.tainted else row.stamp(position)

    def _check(self, row: Row, block: int, offset: int, position: int) -> None:
        self.checks += 1
        found = self.memory.get(block, {}).get(offset, POISON)
        if found == GARBAGE:
            row.tainted = True
        if row.tainted:
            return
        assert found == row.stamp(position), f"position {position} of block {block} holds other content"

    def load(
        self, tables: Sequence[Sequence[int]], groups: Sequence[int], tokens: list[int], first: int
    ) -> None:
        """What a connector does: bring the content of positions `[first, len(tokens))` of these groups."""
        row = Row(tokens, [])
        for group, block, offset, position in self.targets(tables, groups, len(tokens), first):
            del group
            self.memory.setdefault(block, {})[offset] = row.stamp(position)

    def spoil(
        self, tables: Sequence[Sequence[int]], groups: Sequence[int], num_tokens: int, first: int
    ) -> set[int]:
        """A load that failed; returns the blocks concerned."""
        targets = self.targets(tables, groups, num_tokens, first)
        for _, block, offset, _ in targets:
            self.memory.setdefault(block, {})[offset] = GARBAGE
        return {block for _, block, _, _ in targets}

    def targets(
        self, tables: Sequence[Sequence[int]], groups: Sequence[int], num_tokens: int, first: int
    ) -> list[tuple[int, int, int, int]]:
        """(group, block, offset, position) of everything a load of positions `[first, num_tokens)` writes."""
        found = []
        for group in groups:
            size, table = self.specs[group].block_size, tables[group]
            if isinstance(self.specs[group], MambaSpec):
                found.append((group, table[(num_tokens - 1) // size], 0, num_tokens - 1))
                continue
            for position in range(first, num_tokens):
                if table[position // size] != 0:
                    found.append((group, table[position // size], position % size, position))
        return found

    # --- sampling ---------------------------------------------------------------------------------------------------

    def _sample(self, output: SchedulerOutput, starts: dict[str, int]) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        nans: dict[str, int] = {}
        for request_id in ids:
            row = self.rows[request_id]
            end = starts[request_id] + output.num_scheduled_tokens[request_id]
            if request_id in self.corrupt:
                nans[request_id] = VOCAB
                sampled.append([])
                row.tokens.append(0)  # a step that is scheduled already needs some token
                self._accept(row, end, 0)
                continue
            sampled.append([] if end < len(row.tokens) else self._verify(row, row.num_drafts))
            self._accept(row, end, max(0, len(sampled[-1]) - 1))
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            num_nans_in_logits=nans or None,
        )

    def _verify(self, row: Row, num_drafts: int) -> list[int]:
        """Accept drafts as long as the model agrees, then add one token of its own."""
        base = len(row.tokens) - num_drafts
        drafts, row.tokens, row.stamps = row.tokens[base:], row.tokens[:base], []
        new: list[int] = []
        for draft in [*drafts, None]:
            token = (next_token(row.tokens) + row.tainted) % VOCAB
            row.tokens.append(token)
            new.append(token)
            if token != draft:
                break
        return new
