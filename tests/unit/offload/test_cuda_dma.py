"""The mover with the device's copy engines: what a copy that fails half way leaves behind, with a device that is played."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.v1.simple_kv_offload import cuda_mem_ops
from vllm.v1.simple_kv_offload.copy_backends import cuda_dma, cuda_gather
from vllm.v1.simple_kv_offload.copy_backends.base import CopyResult, EventsList
from vllm.v1.simple_kv_offload.copy_backends.cuda_dma import DmaCopyBackend
from vllm.v1.simple_kv_offload.copy_backends.cuda_gather import SMALL_BLOCK_BYTES


class PlayedEvent:
    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: Any) -> None:
        stream.log.append("mark")


class PlayedStream:
    """Remembers what it is given, and whether the copies were over for the engine when it was waited for."""

    cuda_stream = 5

    def __init__(self, events: EventsList) -> None:
        self.events = events
        self.log: list[str] = []
        self.is_over_at_wait: list[bool] = []

    def synchronize(self) -> None:
        ((_, event),) = self.events
        self.is_over_at_wait.append(event.query())


@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
def test_a_copy_that_fails_half_way_is_over_when_the_device_is_through_with_the_first_half(
    monkeypatch: pytest.MonkeyPatch, is_store: bool
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("the copy engines refuse")

    waited_for: list[torch.device] = []
    for name, played in {
        "Event": PlayedEvent,
        "set_device": lambda device: None,
        "stream": lambda stream: nullcontext(),
        "synchronize": waited_for.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, played)
    monkeypatch.setattr(cuda_dma, "names_of_small", lambda *_: frozenset({"small"}))
    monkeypatch.setattr(cuda_gather, "_pinned", lambda ids: torch.tensor(ids))
    monkeypatch.setattr(cuda_mem_ops, "_batch_copy", lambda: refuse)
    regions = [
        {
            "small": torch.full((4, SMALL_BLOCK_BYTES), value, dtype=torch.int8),
            "large": torch.zeros(4, SMALL_BLOCK_BYTES + 16, dtype=torch.int8),
        }
        for value in (1, 2)
    ]
    events: EventsList = []
    stream: Any = PlayedStream(events)
    backend = DmaCopyBackend(clock=SimpleNamespace(monotonic=lambda: 0.0, time=lambda: 0.0))
    backend.init(regions[0], regions[1], torch.device("cpu"), stream, stream)
    backend.launch_copy([1], [2], is_store, 7, events)
    ((_, result),) = events
    assert isinstance(result, CopyResult)
    assert result.synchronize(30.0)
    assert "refuse" in str(result.error)
    source, target = regions if is_store else regions[::-1]
    assert torch.equal(target["small"][2], source["small"][1]), "the first half was under way"
    assert stream.is_over_at_wait == [False]
    backend.shutdown()
    assert waited_for == [torch.device("cpu")], "the device of the copies, whichever is the current one"
