"""Limits of LoRA adapters. Layer: L1."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vllm.config.setting import config, setting


@config
class LoRAConfig:
    """How many adapters of which size may run together."""

    max_lora_rank: Annotated[int, Field(ge=1)] = setting(default=16, doc="Largest adapter rank.")
    max_loras: Annotated[int, Field(ge=1)] = setting(default=1, doc="Most different adapters in one step.")
    fully_sharded_loras: bool = setting(default=False, doc="Shard both factors of an adapter over ranks.")
    max_cpu_loras: Annotated[int, Field(ge=1)] | None = setting(
        default=None, doc="Most adapters kept in host memory; max_loras when not given."
    )
    lora_dtype: str = setting(default="auto", doc="Dtype of adapter weights; auto is the model's.")

    def __post_init__(self) -> None:
        if self.max_cpu_loras is None:
            self.max_cpu_loras = self.max_loras
        elif self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras={self.max_cpu_loras} must be at least max_loras={self.max_loras}"
            )
