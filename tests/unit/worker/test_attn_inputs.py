"""Inputs of a step: positions, ids, block tables and slots, for each kind of cache group."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.steps import cached_requests, new_request, step_output
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.attn_inputs import StepInputs
from vllm.v1.worker.input_batch import RequestStates
from vllm.v1.worker.step_rows import order_rows

FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)
RING = CircularBufferSpec(block_size=8, num_kv_heads=2, head_size=4, head_size_v=0, dtype=torch.float32)
STATE = MambaSpec(4, ((2, 2),), (torch.float32,), mamba_cache_mode="align")
REPLAYED = SlidingWindowMLASpec(
    block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=4, bounded_replay=True
)
CPU = torch.device("cpu")


def build(states: RequestStates, groups: list[KVCacheGroupSpec], scheduled: dict[str, int]):
    rows = order_rows(states, scheduled)
    inputs = StepInputs(groups, 16, 4, CPU)
    ids, meta = inputs.build(states, rows.slots, rows.query_lens, rows.num_decodes)
    return rows, ids, meta, inputs


@pytest.fixture
def mixed():
    """`dec` decodes its 7th token, `pre` starts a 5-token prompt, `mid` goes on with 3 tokens of a prompt."""
    states = RequestStates(4, 64, [16, 1, 16], 0)
    decoding = new_request("dec", [10, 11, 12, 13, 14, 15, 16], [[3, 5], [6], [0, 4]], num_computed=6)
    middle = new_request("mid", [30, 31, 32, 33, 34, 35, 36, 37], [[8, 9], [2], [0, 7]], num_computed=3)
    fresh = new_request("pre", [20, 21, 22, 23, 24], [[1, 2], [0], [11, 12]])
    scheduled = {"pre": 5, "mid": 3, "dec": 1}
    states.apply(step_output(scheduled, [middle, fresh, decoding]))
    groups = [
        KVCacheGroupSpec(["f0", "f1"], FULL),
        KVCacheGroupSpec(["ring"], RING),
        KVCacheGroupSpec(["s"], STATE),
    ]
    return build(states, groups, scheduled)


def test_decodes_come_first_and_lists_describe_the_rows(mixed) -> None:
    rows, ids, meta, inputs = mixed
    assert rows.req_ids == ["dec", "pre", "mid"]
    assert (meta.num_reqs, meta.num_tokens, meta.num_decodes) == (3, 9, 1)
    assert meta.query_lens == [1, 5, 3]
    assert meta.context_lens == [6, 0, 3]
    assert meta.seq_lens == [7, 5, 6]
    assert meta.query_start.tolist() == inputs.query_start[:4].tolist() == [0, 1, 6, 9]
    assert meta.positions.tolist() == [6, 0, 1, 2, 3, 4, 3, 4, 5]
    assert ids.tolist() == [16, 20, 21, 22, 23, 24, 33, 34, 35]
    assert meta.replay_starts == [0, 0, 0]
    assert rows.samples.tolist() == [True, True, False]


def test_paged_groups_share_their_metadata(mixed) -> None:
    meta = mixed[2]
    assert meta.groups["f0"] is meta.groups["f1"]
    group = meta.groups["f0"]
    assert group.block_table.tolist() == [[3, 5], [1, 2], [8, 9]]
    assert group.block_table.dtype == torch.int32
    assert group.slot_mapping.tolist() == [22, 4, 5, 6, 7, 8, 35, 36, 37]
    assert group.slot_mapping.dtype == torch.int64


def test_ring_slots_wrap_and_the_null_ring_is_not_written(mixed) -> None:
    group = mixed[2].groups["ring"]
    assert group.block_table.tolist() == [[6], [0], [2]]
    assert group.slot_mapping.tolist() == [6 * 8 + 6, -1, -1, -1, -1, -1, 2 * 8 + 3, 2 * 8 + 4, 2 * 8 + 5]


def test_ring_example_of_the_specification() -> None:
    states = RequestStates(1, 64, [1], 0)
    states.apply(step_output({"a": 4}, [new_request("a", list(range(10)), [[5]], num_computed=6)]))
    meta = build(states, [KVCacheGroupSpec(["ring"], RING)], {"a": 4})[2]
    assert meta.groups["ring"].slot_mapping.tolist() == [46, 47, 40, 41]


def test_state_groups_have_no_slots(mixed) -> None:
    group = mixed[2].groups["s"]
    assert group.slot_mapping is None
    assert group.block_table.tolist() == [[0, 4], [11, 12], [0, 7]]


def test_null_blocks_are_never_written() -> None:
    states = RequestStates(1, 64, [4], 0)
    states.apply(step_output({"a": 6}, [new_request("a", list(range(6)), [[0, 3]])]))
    meta = build(states, [KVCacheGroupSpec(["w"], FULL)], {"a": 6})[2]
    assert meta.groups["w"].slot_mapping.tolist() == [-1, -1, -1, -1, 12, 13]


def test_replayed_rows_are_written_only_where_they_are_not_cached() -> None:
    states = RequestStates(2, 64, [4, 4], 0, replay_tokens=4)
    replaying = new_request("a", list(range(11)), [[1, 2, 3], [0, 5, 6]], num_computed=4, replay_start=4)
    plain = new_request("b", list(range(2)), [[7], [8]])
    states.apply(step_output({"a": 7, "b": 2}, [replaying, plain]))
    groups = [KVCacheGroupSpec(["f"], FULL), KVCacheGroupSpec(["w"], REPLAYED)]
    meta = build(states, groups, {"a": 7, "b": 2})[2]
    assert meta.groups["f"].slot_mapping.tolist() == [-1, -1, -1, -1, 12, 13, 14, 28, 29]
    assert meta.groups["w"].slot_mapping.tolist() == [20, 21, 22, 23, 24, 25, 26, 32, 33]
    assert meta.replay_starts == [4, 0]
    states.apply(step_output({"a": 1}, cached=cached_requests([("a", None, 10, 0)])))
    assert build(states, groups, {"a": 1})[2].groups["f"].slot_mapping.tolist() == [14]


def test_a_group_of_unequal_pages_uses_its_common_block_size() -> None:
    wide = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=16, dtype=torch.float32)
    spec = UniformTypeKVCacheSpecs(4, {"x": FULL, "y": wide})
    states = RequestStates(1, 64, [4], 0)
    states.apply(step_output({"a": 5}, [new_request("a", list(range(5)), [[2, 9]])]))
    meta = build(states, [KVCacheGroupSpec(["x", "y"], spec)], {"a": 5})[2]
    assert meta.groups["y"].slot_mapping.tolist() == [8, 9, 10, 11, 36]
    assert meta.groups["x"] is meta.groups["y"]


def test_tokens_that_are_not_known_are_refused() -> None:
    states = RequestStates(1, 64, [4], 0)
    states.apply(step_output({"a": 4}, [new_request("a", [1, 2, 3], [[1]])]))
    with pytest.raises(ValueError, match="up to token 4, but only 3 tokens are known"):
        build(states, [KVCacheGroupSpec(["f"], FULL)], {"a": 4})


def test_buffers_are_reused_and_grow() -> None:
    states = RequestStates(8, 64, [4], 0)
    inputs = StepInputs([KVCacheGroupSpec(["f"], FULL)], 2, 1, CPU)
    requests = [new_request(f"r{i}", [i] * 3, [[i + 1]]) for i in range(6)]
    states.apply(step_output({r.req_id: 3 for r in requests}, requests))
    slots = states.slots_of(r.req_id for r in requests)
    ids, meta = inputs.build(states, slots, np.full(6, 3), 0)
    assert ids.tolist() == [i for i in range(6) for _ in range(3)]
    assert meta.groups["f"].block_table.flatten().tolist() == [1, 2, 3, 4, 5, 6]
    again, _ = inputs.build(states, slots, np.full(6, 3), 0)
    assert again.data_ptr() == ids.data_ptr()
