"""A LoRA adapter as a request names it. Layer: L1."""

from __future__ import annotations

import msgspec


class LoRARequest(msgspec.Struct, omit_defaults=True, array_like=True):
    """Name, engine-wide id (≥ 1) and folder of an adapter. Equality is by name."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be at least 1, got {self.lora_int_id}")

    @property
    def adapter_id(self) -> int:
        """The engine-wide id."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """The adapter's name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The adapter's folder."""
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        # The interpreter's text hash is salted per process; it is used for look-ups in one process only.
        return hash(self.lora_name)
