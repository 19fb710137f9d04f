"""Public facade: the model runner on the host processor. Layer: L6."""

from __future__ import annotations

import torch

from vllm.config import VllmConfig
from vllm.v1.worker.model_runner import ModelRunner


class CPUModelRunner(ModelRunner):
    """A `ModelRunner` for the CPU."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(f"CPUModelRunner needs a CPU device, got {device}")
        super().__init__(vllm_config, device)
