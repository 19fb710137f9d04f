"""Which floating-point type the model computes in, as a name; torch is loaded only when its object is read. Layer: L1."""

from __future__ import annotations

from typing import Any, Final

from vllm.config.device import detect_device_type
from vllm.transformers_utils.config_record import ConfigRecord
from vllm.utils.registry import resolve_object

NAMES: Final = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}


def check_dtype(value: Any) -> str | Any:
    """`auto`, a canonical name, or a torch dtype as it is. Raises ValueError for anything else."""
    if not isinstance(value, str):
        if str(value).removeprefix("torch.") not in NAMES.values():
            raise ValueError(f"dtype={value!r} is not supported; supported: auto, {', '.join(NAMES)}")
        return value
    if value == "auto":
        return value
    if value not in NAMES:
        raise ValueError(f"dtype={value!r} is not supported; supported: auto, {', '.join(NAMES)}")
    return NAMES[value]


def auto_dtype_name(config: ConfigRecord) -> str:
    """The dtype that `auto` means.

    The checkpoint's own, except that a float32 (or unstated) one becomes bfloat16 on a GPU and stays float32 on a CPU.
    """
    stated = config.first("dtype", "torch_dtype") or config.get_text_config().first("dtype", "torch_dtype")
    name = str(stated).removeprefix("torch.")
    if name in ("float16", "bfloat16"):
        return name
    return "float32" if detect_device_type() == "cpu" else "bfloat16"


class TorchDType:
    """Descriptor of `ModelConfig.dtype`: holds a name until it is read, then the torch dtype."""

    def __init__(self, default: str) -> None:
        self._default = default

    # A torch.dtype: this layer only passes it on.
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self._default
        value = vars(instance)["dtype"]
        if isinstance(value, str):
            name = auto_dtype_name(instance.hf_config) if value == "auto" else NAMES[value]
            value = resolve_object(f"torch:{name}")
            vars(instance)["dtype"] = value
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)["dtype"] = check_dtype(value)
