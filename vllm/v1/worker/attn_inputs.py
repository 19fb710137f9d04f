"""The tensors and lists a forward pass is given, built from the requests' state into reused buffers. Layer: L6.

Owns: positions, input ids, block tables and slots of a step. Must not know: models, sampling, how rows were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import GroupMeta, StepMeta
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.worker.block_table import BlockTable, Int64Array
from vllm.v1.worker.input_batch import RequestStates
from vllm.v1.worker.staging import StagingBuffer, make_staging


@dataclass(slots=True)
class _Rows:
    """One step in arrays: per row its slot and lengths, per token its slot and position."""

    slots: Int64Array
    query_lens: Int64Array
    context: Int64Array
    seq_lens: Int64Array
    token_slots: Int64Array
    positions: Int64Array


class _Group:
    """Builds the metadata of one KV cache group."""

    def __init__(
        self, spec: KVCacheGroupSpec, max_num_tokens: int, max_num_rows: int, device: torch.device
    ) -> None:
        kv_spec = spec.kv_cache_spec.kind_spec
        self.layer_names = list(spec.layer_names)
        self.block_size = kv_spec.block_size
        # Three rules for slots: pages by position; one ring per request; recurrent states have no slots.
        self._is_paged = kv_spec.uses_slot_mapping
        self._is_ring = not self._is_paged and kv_spec.tokens_per_state > 0
        self._rewrites_replayed = spec.kv_cache_spec.prefix_replay_tokens > 0
        self._slot_buffer = make_staging(max_num_tokens, torch.int64, device)
        self._table_buffer = make_staging(max_num_rows, torch.int32, device)

    def build(self, rows: _Rows, table: BlockTable, replay_end: Int64Array | None) -> GroupMeta:
        slot_mapping = None
        if self._is_paged or self._is_ring:
            slot_mapping = self._slots(rows, table, replay_end)
        return GroupMeta(self.block_size, self._block_table(rows, table), slot_mapping)

    def _block_table(self, rows: _Rows, table: BlockTable) -> Tensor:
        width = 1
        if not self._is_ring:
            width = min(table.ids.shape[1], max(1, cdiv(int(rows.seq_lens.max()), self.block_size)))
        count = len(rows.slots)
        target = self._table_buffer.host(count * width).reshape(count, width)
        # Slots are in range; "clip" lets numpy write into the target without a copy in between.
        np.take(table.ids[:, :width], rows.slots, axis=0, out=target, mode="clip")
        return self._table_buffer.commit(count * width).view(count, width)

    def _slots(self, rows: _Rows, table: BlockTable, replay_end: Int64Array | None) -> Tensor:
        size = self.block_size
        blocks, offsets = np.divmod(rows.positions, size)
        if self._is_ring:
            blocks = np.zeros_like(blocks)
        ids = table.ids[rows.token_slots, blocks]
        count = len(ids)
        target = self._slot_buffer.host(count)
        np.multiply(ids, size, out=target, casting="unsafe")
        target += offsets
        target[ids == 0] = -1
        if replay_end is not None and not self._rewrites_replayed:
            # These rows are computed again only for a window; their bytes are cached and maybe shared.
            target[rows.positions < replay_end[rows.token_slots]] = -1
        return self._slot_buffer.commit(count)


class StepInputs:
    """Builds `input_ids` and `StepMeta`. The tensors are reused: they hold until the next `build`."""

    def __init__(
        self,
        groups: Sequence[KVCacheGroupSpec],
        max_num_tokens: int,
        max_num_rows: int,
        device: torch.device,
    ) -> None:
        self._groups = [_Group(group, max_num_tokens, max_num_rows, device) for group in groups]
        self._ids: StagingBuffer = make_staging(max_num_tokens, torch.int64, device)
        self._positions: StagingBuffer = make_staging(max_num_tokens, torch.int64, device)
        self._starts: StagingBuffer = make_staging(max_num_rows + 1, torch.int32, device)
        self.query_start = np.zeros(max_num_rows + 1, dtype=np.int64)

    def build(
        self, states: RequestStates, slots: Int64Array, query_lens: Int64Array, num_decodes: int
    ) -> tuple[Tensor, StepMeta]:
        """Inputs of a step with row r computing `query_lens[r]` tokens of the request in `slots[r]`.

        `ValueError` if a row would compute tokens that are not known. `query_start` keeps the first token of each row.
        """
        rows = self._rows(states, slots, query_lens)
        num_rows, num_tokens = len(slots), len(rows.positions)
        ids, positions = self._ids.host(num_tokens), self._positions.host(num_tokens)
        ids[:] = states.tokens[rows.token_slots, rows.positions]
        positions[:] = rows.positions
        starts = self._starts.host(num_rows + 1)
        starts[:] = self.query_start[: num_rows + 1]
        replay_end = self._replay_end(states, rows)
        groups: dict[str, GroupMeta] = {}
        for index, group in enumerate(self._groups):
            meta = group.build(rows, states.block_tables[index], replay_end)
            groups.update(dict.fromkeys(group.layer_names, meta))
        step = StepMeta(
            num_reqs=num_rows,
            num_tokens=num_tokens,
            query_start=self._starts.commit(num_rows + 1),
            query_lens=rows.query_lens.tolist(),
            context_lens=rows.context.tolist(),
            seq_lens=rows.seq_lens.tolist(),
            positions=self._positions.commit(num_tokens),
            num_decodes=num_decodes,
            groups=groups,
            replay_starts=[0] * num_rows if replay_end is None else states.replay_start[slots].tolist(),
        )
        return self._ids.commit(num_tokens), step

    def _rows(self, states: RequestStates, slots: Int64Array, query_lens: Int64Array) -> _Rows:
        num_rows = len(slots)
        if num_rows >= len(self.query_start):
            self.query_start = np.zeros(2 * num_rows + 1, dtype=np.int64)
        np.cumsum(query_lens, out=self.query_start[1 : num_rows + 1])
        context = states.num_computed[slots]
        seq_lens = context + query_lens
        known = states.num_tokens[slots]
        if (seq_lens > known).any():
            bad = int(np.argmax(seq_lens > known))
            raise ValueError(
                f"the request in slot {slots[bad]} is scheduled up to token {seq_lens[bad]}, "
                f"but only {known[bad]} tokens are known"
            )
        if int(self.query_start[num_rows]) == num_rows:
            return _Rows(slots, query_lens, context, seq_lens, slots, context)
        first = self.query_start[:num_rows]
        positions = np.arange(int(self.query_start[num_rows])) + np.repeat(context - first, query_lens)
        return _Rows(slots, query_lens, context, seq_lens, np.repeat(slots, query_lens), positions)

    @staticmethod
    def _replay_end(states: RequestStates, rows: _Rows) -> Int64Array | None:
        """Ends of replayed ranges by slot, or None if no row of this step replays."""
        if not states.replay_tokens or not (states.replay_end[rows.slots] > rows.context).any():
            return None
        return states.replay_end
