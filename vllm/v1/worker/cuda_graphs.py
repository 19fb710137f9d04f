"""Capture and replay of decode steps. Layer: L6.

Owns: captured graphs by batch size, their fixed input buffers, padding. Must not know: models beyond one promise, how
inputs are made. A graph repeats kernels with the addresses and Python values of its capture, so only a model whose
decode reads nothing but tensors may be captured; such a model says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from vllm.v1.attention.backend import GroupMeta, StepMeta

Forward = Callable[[Tensor, StepMeta], Tensor]
# Runs the function once while recording; returns its result's buffer and a call that repeats it.
Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


@runtime_checkable
class GraphSafeModel(Protocol):
    """The promise: with `num_decodes == num_reqs`, `forward` depends on the tensors of its arguments alone."""

    graph_safe_decode: bool


def graph_sizes(max_num_reqs: int) -> list[int]:
    """Batch sizes worth a graph, largest first (later captures reuse the memory of earlier ones)."""
    sizes = [1, 2, 4, *range(8, max_num_reqs + 1, 8), max_num_reqs]
    return sorted({size for size in sizes if size <= max_num_reqs}, reverse=True)


def capture_cuda_graph(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Record `run` on the current device, after one warm-up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return result, graph.replay


@dataclass(slots=True)
class _Captured:
    input_ids: Tensor
    meta: StepMeta
    hidden: Tensor
    replay: Callable[[], None]


class DecodeGraphs:
    """Replays decode steps; a batch is padded to the next captured size with rows that write nothing."""

    def __init__(self, forward: Forward, capture: Capture) -> None:
        self._forward = forward
        self._capture = capture
        self._by_size: dict[int, _Captured] = {}

    def capture(self, input_ids: Tensor, meta: StepMeta) -> None:
        """Record a decode step of `meta.num_reqs` rows; its block tables must be as wide as they can get."""
        fixed = _fixed_copy(meta)
        ids = input_ids.clone()
        hidden, replay = self._capture(lambda: self._forward(ids, fixed))
        self._by_size[meta.num_reqs] = _Captured(ids, fixed, hidden, replay)

    def run(self, input_ids: Tensor, meta: StepMeta) -> Tensor | None:
        """Hidden states of a pure decode step, valid until the next run; None if it must run eagerly."""
        if meta.num_decodes != meta.num_reqs:
            return None
        sizes = [size for size in self._by_size if size >= meta.num_reqs]
        if not sizes:
            return None
        captured = self._by_size[min(sizes)]
        _fill(captured.input_ids, input_ids, 0)
        _fill(captured.meta.positions, meta.positions, 0)
        for name, fixed in captured.meta.groups.items():
            group = meta.groups[name]
            width = group.block_table.shape[1]
            if width > fixed.block_table.shape[1]:
                return None
            fixed.block_table.zero_()
            fixed.block_table[: meta.num_reqs, :width] = group.block_table
            if fixed.slot_mapping is not None and group.slot_mapping is not None:
                _fill(fixed.slot_mapping, group.slot_mapping, -1)
        captured.replay()
        return captured.hidden[: meta.num_reqs]


def _fill(target: Tensor, source: Tensor, padding: int) -> None:
    target[: source.shape[0]] = source
    target[source.shape[0] :] = padding


def _fixed_copy(meta: StepMeta) -> StepMeta:
    """The same step on tensors of its own; layers of one group go on sharing theirs."""
    copies: dict[int, GroupMeta] = {}
    for group in meta.groups.values():
        if id(group) not in copies:
            slots = None if group.slot_mapping is None else group.slot_mapping.clone()
            copies[id(group)] = GroupMeta(group.block_size, group.block_table.clone(), slots)
    return replace(
        meta,
        query_start=meta.query_start.clone(),
        positions=meta.positions.clone(),
        groups={name: copies[id(group)] for name, group in meta.groups.items()},
        derived={},
    )
