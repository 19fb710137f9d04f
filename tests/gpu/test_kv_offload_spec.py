"""Host memory as an offloading spec, on a device."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kv_offload.test_cpu_worker import (
    tensors,
    test_bytes_come_back,
    test_what_cannot_be_copied_is_refused_or_fails,
    worker,
)

__all__ = ["tensors", "test_bytes_come_back", "test_what_cannot_be_copied_is_refused_or_fails", "worker"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
