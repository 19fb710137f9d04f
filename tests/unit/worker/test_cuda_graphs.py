"""Replay of captured decodes, with a stand-in for the device's graphs; and memory arithmetic of the GPU worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vllm.v1.attention.backend import GroupMeta, StepMeta
from vllm.v1.worker.cuda_graphs import DecodeGraphs, graph_sizes
from vllm.v1.worker.gpu_worker import bytes_left_for_cache, check_start_memory


def decode_step(positions: list[int], width: int, seed: int = 0) -> tuple[torch.Tensor, StepMeta]:
    rows = len(positions)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(1, 50, (rows, width), generator=generator, dtype=torch.int32)
    slots = table[:, -1].to(torch.int64) * 4
    group = GroupMeta(4, table, slots)
    state = GroupMeta(4, table.clone(), None)
    meta = StepMeta(
        num_reqs=rows,
        num_tokens=rows,
        query_start=torch.arange(rows + 1, dtype=torch.int32),
        query_lens=[1] * rows,
        context_lens=positions,
        seq_lens=[p + 1 for p in positions],
        positions=torch.tensor(positions),
        num_decodes=rows,
        groups={"a": group, "b": group, "s": state},
    )
    return torch.randint(0, 100, (rows,), generator=generator), meta


def forward(input_ids: torch.Tensor, meta: StepMeta) -> torch.Tensor:
    """A "model" that reads tensors only."""
    group, state = meta.groups["a"], meta.groups["s"]
    written = (group.slot_mapping >= 0).to(torch.int64) * group.slot_mapping
    total = (
        input_ids
        + 7 * meta.positions
        + 11 * group.block_table.sum(1)
        + 13 * written
        + state.block_table.sum(1)
    )
    return total.unsqueeze(1)


class Recorder:
    """Replays by calling the recorded function again on its fixed buffers."""

    def __init__(self) -> None:
        self.replays = 0
        self.seen: StepMeta | None = None

    def forward(self, input_ids: torch.Tensor, meta: StepMeta) -> torch.Tensor:
        self.seen = meta
        return forward(input_ids, meta)

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        result = run()

        def replay() -> None:
            self.replays += 1
            result.copy_(run())

        return result, replay


@pytest.fixture
def graphs() -> tuple[DecodeGraphs, Recorder]:
    recorder = Recorder()
    graphs = DecodeGraphs(recorder.forward, recorder.capture)
    for size in (4, 2):
        graphs.capture(*decode_step([9] * size, width=6))
    return graphs, recorder


@pytest.mark.parametrize("positions", [[5], [3, 8], [1, 2, 3], [4, 5, 6, 7]])
def test_replays_equal_eager_runs_at_every_size(graphs, positions) -> None:
    replayed, recorder = graphs
    for seed, width in enumerate((6, 2, 4)):
        ids, meta = decode_step(positions, width, seed)
        assert torch.equal(replayed.run(ids, meta), forward(ids, meta))
    assert recorder.replays == 3


def test_padding_rows_write_nothing(graphs) -> None:
    replayed, recorder = graphs
    replayed.run(*decode_step([4, 5, 6, 7], 6))
    replayed.run(*decode_step([1, 2, 3], 3))
    fixed = recorder.seen
    assert fixed is not None
    assert fixed.num_reqs == 4
    assert fixed.groups["a"] is fixed.groups["b"]
    assert fixed.groups["a"].slot_mapping[3] == -1
    assert not fixed.groups["a"].block_table[3].any()
    assert not fixed.groups["a"].block_table[:, 3:].any()


def test_what_was_not_captured_runs_eagerly(graphs) -> None:
    replayed, recorder = graphs
    assert replayed.run(*decode_step([1] * 5, 2)) is None
    assert replayed.run(*decode_step([1], 7)) is None
    ids, meta = decode_step([1, 2], 2)
    meta.num_decodes = 1
    assert replayed.run(ids, meta) is None
    assert recorder.replays == 0


def test_sizes_are_dense_when_small_and_end_at_the_limit() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(20) == [20, 16, 8, 4, 2, 1]


def test_memory_left_for_the_cache() -> None:
    assert bytes_left_for_cache(1000, 0.9, 500, 100) == 300
    assert bytes_left_for_cache(1000, 0.5, 500, 100) == 0
    check_start_memory(1000, 900, 0.9)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=0\.9"):
        check_start_memory(1000, 800, 0.9)
