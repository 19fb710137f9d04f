"""Which device the engine runs on, found without loading torch. Layer: L1."""

from __future__ import annotations

from typing import Any

from vllm import platforms
from vllm.config.setting import config, setting, state

DEVICE_TYPES = ("cuda", "cpu")


def detect_device_type() -> str:
    """The kind of device of this process: what the platform says, `cpu` where no device was found."""
    platform = platforms.current_platform
    return platform.device_type or "cpu"


@config
class DeviceConfig:
    """The device; `device_type` is the resolved kind."""

    # A `torch.device` is accepted too; nothing here looks at more than its `type`.
    device: Any = setting(default="auto", doc="Device to run on: auto, cuda or cpu.")
    device_type: str = state(default="", doc="Resolved kind of device.")

    def __post_init__(self) -> None:
        name = self.device if isinstance(self.device, str) else str(self.device.type)
        name = name.partition(":")[0]
        if name == "auto":
            self.device_type = detect_device_type()
            self.device = self.device_type
        elif name in DEVICE_TYPES:
            self.device_type = name
        else:
            raise ValueError(
                f"device={self.device!r} is not supported; use one of auto, {', '.join(DEVICE_TYPES)}"
            )
