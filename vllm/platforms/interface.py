"""What a device platform can be asked; one subclass per kind of device, and plugins may bring their own.

Owns: the list of questions and their neutral answers. Must not know: any device library, the engine's objects beyond
the attributes it reads off a config. Layer L6, but it imports only L0, so that everything may ask.
"""

from __future__ import annotations

import enum
import platform
from typing import Any, ClassVar

# Configs, parsers and requests are passed through unread by the base class, hence `Any` in this file.


class PlatformEnum(enum.Enum):
    """Kinds of device."""

    CUDA = enum.auto()
    ROCM = enum.auto()
    TPU = enum.auto()
    XPU = enum.auto()
    CPU = enum.auto()
    OOT = enum.auto()
    UNSPECIFIED = enum.auto()


class CpuArchEnum(enum.Enum):
    """Processor families."""

    X86 = enum.auto()
    ARM = enum.auto()
    OTHER = enum.auto()


class Platform:
    """Facts about the devices of this process, and the hooks through which a platform shapes the engine.

    All answers are static or cheap; nothing here may initialise a device. A subclass sets the class variables and
    overrides the hooks it needs.
    """

    _enum: ClassVar[PlatformEnum] = PlatformEnum.UNSPECIFIED
    device_name: ClassVar[str] = ""
    device_type: ClassVar[str] = ""
    # torch.distributed backend between workers of this platform.
    dist_backend: ClassVar[str] = ""
    # "module.Class" of the worker that `parallel_config.worker_cls == "auto"` stands for.
    worker_cls: ClassVar[str] = ""
    # Tokens per KV block when neither user nor model chooses.
    default_block_size: ClassVar[int] = 16
    # A hybrid model's attention block is a multiple of this many tokens.
    hybrid_block_alignment: ClassVar[int] = 16
    # Names of torch dtypes with fast arithmetic, best first.
    supported_dtype_names: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "float32")

    # -- which device -----------------------------------------------------------------------------

    def is_cuda(self) -> bool:
        """NVIDIA GPU."""
        return self._enum is PlatformEnum.CUDA

    def is_rocm(self) -> bool:
        """AMD GPU."""
        return self._enum is PlatformEnum.ROCM

    def is_tpu(self) -> bool:
        """TPU."""
        return self._enum is PlatformEnum.TPU

    def is_xpu(self) -> bool:
        """Intel GPU."""
        return self._enum is PlatformEnum.XPU

    def is_cpu(self) -> bool:
        """Host processor."""
        return self._enum is PlatformEnum.CPU

    def is_out_of_tree(self) -> bool:
        """A platform brought by a plugin."""
        return self._enum is PlatformEnum.OOT

    def is_unspecified(self) -> bool:
        """No usable device is known."""
        return self._enum is PlatformEnum.UNSPECIFIED

    def is_cuda_alike(self) -> bool:
        """A GPU with the CUDA programming model."""
        return self._enum in (PlatformEnum.CUDA, PlatformEnum.ROCM)

    @classmethod
    def get_cpu_architecture(cls) -> CpuArchEnum:
        """The family of the host processor."""
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64", "i386", "i686"):
            return CpuArchEnum.X86
        if machine.startswith(("arm", "aarch")):
            return CpuArchEnum.ARM
        return CpuArchEnum.OTHER

    # -- facts ------------------------------------------------------------------------------------

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Human-readable name of a device."""
        return cls.device_name

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of memory of a device."""
        raise RuntimeError(f"Platform {cls.__name__} has no device memory")

    @classmethod
    def get_device_count(cls) -> int:
        """Visible devices."""
        return 0

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Whether page-locked host memory speeds up copies to this device."""
        return False

    @classmethod
    def is_async_output_supported(cls, enforce_eager: bool | None = None) -> bool:
        """Whether a step may be prepared while the previous one runs."""
        return True

    # -- hooks ------------------------------------------------------------------------------------

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Called before flags are parsed; a plugin may add its own."""
        return

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        """Called while a `VllmConfig` is built, before values are resolved."""
        return

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Called at the end of building a `VllmConfig`: refuse what cannot work, fill in what depends on the device."""
        return

    @classmethod
    def check_replicas(cls, num_replicas: int, ranks_each: int) -> None:
        """Called before several engines of one server start: `ValueError` for more than the machine has room for."""
        return

    @classmethod
    def get_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        """ "module.Class" of the attention backend; "" leaves the choice to the backend table."""
        return ""

    @classmethod
    def get_kv_cache_config_builder_cls(cls, vllm_config: Any) -> str:
        """ "module.Class" of the builder that turns KV specs into groups and placements."""
        return "vllm.v1.core.kv_cache_planning.DefaultKVCacheConfigBuilder"

    @classmethod
    def register_custom_kv_cache_specs(cls, vllm_config: Any) -> None:
        """Called after the built-in KV specs were registered."""
        return

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Whether groups of different kinds may share one pool here."""
        return True

    @classmethod
    def validate_request(cls, *args: Any, **kwargs: Any) -> None:
        """Called for each request in the front end; raises `ValueError` for what this platform cannot do."""
        return


class UnspecifiedPlatform(Platform):
    """Stands in when no device was found: importing works, running does not."""
