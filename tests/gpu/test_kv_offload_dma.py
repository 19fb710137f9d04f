"""The CUDA copy backend with real streams, events and pinned memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend
from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor, unpin_tensor


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_device_copies_there_and_back() -> None:
    device = torch.device("cuda", 0)
    gpu = {"a": torch.arange(12 * 256, device=device).to(torch.int8).view(12, 256)}
    cpu = {"a": torch.zeros(8, 256, dtype=torch.int8)}
    wanted = gpu["a"].cpu()
    assert pin_tensor(cpu["a"])
    backend = DmaCopyBackend()
    backend.init(gpu, cpu, device, torch.cuda.Stream(device), torch.cuda.Stream(device))
    events: list[Any] = []
    mark = torch.cuda.Event()
    mark.record()
    backend.launch_copy([3, 4, 9], [0, 1, 6], True, 0, events, mark)
    assert events[0][1].synchronize(10.0)
    assert torch.equal(cpu["a"][6], wanted[9])
    gpu["a"].zero_()
    mark.record()
    backend.launch_copy([6, 0], [1, 2], False, 1, events, mark)
    assert events[1][1].synchronize(10.0)
    torch.cuda.synchronize()
    assert torch.equal(gpu["a"][1].cpu(), wanted[9])
    assert torch.equal(gpu["a"][2].cpu(), wanted[3])
    backend.shutdown()
    unpin_tensor(cpu["a"])
