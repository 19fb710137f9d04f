"""What all native models share: settings read at the door, cache binding, and loading weights by name.

Owns: `ModelSettings` (everything a model takes from `VllmConfig`), `NativeModel` (cache table, weight table).
Must not know: a concrete model. Layer L6.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.layernorm import OffsetRMSNorm
from vllm.model_executor.layers.sharding import Slot, Weight, WeightSlot
from vllm.transformers_utils.config_defaults import with_defaults
from vllm.v1.attention.backend import CacheLayer, StepMeta
from vllm.v1.attention.backends.cpu_attn import CpuAttentionBackend
from vllm.v1.attention.backends.registry import get_compute_backend
from vllm.v1.attention.compute import ComputeBackend
from vllm.v1.kv_cache_interface import KVCacheSpec

__all__ = ["ModelSettings", "NativeModel", "config_dict"]

_CACHE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
}


def config_dict(hf_config: Any) -> dict[str, Any]:
    """A config record (ours, a mapping, or one of the transformers library) with the defaults of its family."""
    return with_defaults(hf_config if isinstance(hf_config, Mapping) else hf_config.to_dict())


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """All that a model reads from the engine's configuration.

    `block_size` is the user's wish in tokens (None = the model's choice). `gpu_storage` selects the page formats and
    alignments of GPU kernels; CPU kernels keep wider, exact rows.
    """

    dtype: torch.dtype
    cache_dtype: torch.dtype
    max_model_len: int
    block_size: int | None = None
    enable_prefix_caching: bool = True
    tp_size: int = 1
    num_speculative_tokens: int = 0
    gpu_storage: bool = False
    attention: type[ComputeBackend] = CpuAttentionBackend

    @staticmethod
    def from_vllm_config(vllm_config: Any) -> ModelSettings:
        """Reads the configuration once; `ValueError` for a cache dtype or an attention backend that cannot serve."""
        model, cache = vllm_config.model_config, vllm_config.cache_config
        name = str(cache.cache_dtype or "auto")
        cache_dtype = model.dtype if name == "auto" else _CACHE_DTYPES.get(name)
        if cache_dtype is None:
            raise ValueError(
                f"kv_cache_dtype {name!r} is not supported on CPU; supported: auto, {', '.join(_CACHE_DTYPES)}"
            )
        speculative = vllm_config.speculative_config
        attention = get_compute_backend(vllm_config.attention_config.backend)
        return ModelSettings(
            dtype=model.dtype,
            cache_dtype=cache_dtype,
            max_model_len=model.max_model_len,
            block_size=cache.block_size,
            enable_prefix_caching=bool(cache.enable_prefix_caching),
            tp_size=vllm_config.parallel_config.tensor_parallel_size,
            num_speculative_tokens=speculative.num_speculative_tokens if speculative is not None else 0,
            attention=attention,
        )


class NativeModel(nn.Module, ABC):
    """Base of the native models: `cache_layers` by name, weights by checkpoint name."""

    # Checkpoint names to pass over: buffers that are recomputed, parts that this engine does not run.
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)

    def __init__(self) -> None:
        super().__init__()
        self.cache_layers: dict[str, CacheLayer] = {}
        # Cache name → name of the earlier cache that it reads instead of having one.
        self.shared_caches: dict[str, str] = {}

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, meta: StepMeta) -> Tensor:
        """`[T]`, `[T]` → final hidden states `[T, D]`."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[N, D]` → fp32 `[N, vocab]`."""

    @abstractmethod
    def weight_slots(self) -> Iterator[tuple[str, Slot]]:
        """Every checkpoint name with the tensor that receives it, or with the slot that receives a part of it."""

    @classmethod
    def check_split(cls, config: Mapping[str, Any], tp_size: int) -> None:
        """`ValueError` naming what of a config.json `tp_size` ranks cannot share; needs neither weights nor ranks."""
        return

    def slots(self) -> dict[str, WeightSlot]:
        """The slot of every checkpoint name."""
        return {name: WeightSlot.of(slot) for name, slot in self.weight_slots()}

    def weight_name(self, name: str) -> str | None:
        """The slot name of a checkpoint name, or None to pass it over."""
        return None if name.endswith(self.ignored_suffixes) else name

    def kv_specs(self) -> dict[str, KVCacheSpec]:
        """Every cache name with its spec, in layer order; not those that share a cache."""
        layers = self.cache_layers.items()
        return {name: layer.kv_spec() for name, layer in layers if name not in self.shared_caches}

    def kv_sharing(self) -> dict[str, str]:
        """Cache names that share the cache of another, with that other's name."""
        return dict(self.shared_caches)

    def bind_kv_caches(
        self, caches: Mapping[str, Tensor], specs: Mapping[str, KVCacheSpec] | None = None
    ) -> None:
        """Hands each cache its raw pages; `ValueError` names missing and unknown caches."""
        missing = sorted(self.cache_layers.keys() - caches.keys())
        unknown = sorted(caches.keys() - self.cache_layers.keys())
        if missing or unknown:
            raise ValueError(f"KV pages do not fit the model: missing {missing}, unknown {unknown}")
        for name, layer in self.cache_layers.items():
            layer.bind_kv_cache(caches[name], specs[name] if specs is not None else None)

    def load_weights(self, weights: Iterable[tuple[str, Weight]]) -> set[str]:
        """Copies tensors, or this rank's parts of them, into their slots; returns the slot names filled.

        `ValueError` for a name the model has no place for, a wrong shape, and integers or 8-bit floats (quantised weights, whose scales
        would be missing).
        """
        slots = self.slots()
        loaded: set[str] = set()
        for name, weight in weights:
            slot_name = self.weight_name(name)
            if slot_name is None:
                continue
            slot = slots.get(slot_name)
            if slot is None:
                raise ValueError(
                    f"weight {name!r} {tuple(weight.shape)} has no place in {type(self).__name__}"
                )
            if slot.shape != tuple(weight.shape):
                raise ValueError(
                    f"weight {name!r} has shape {tuple(weight.shape)}, {type(self).__name__} needs {slot.shape}"
                )
            tensor = weight[slot.part]
            if slot.tensor.is_floating_point() and (not tensor.is_floating_point() or tensor.itemsize == 1):
                raise ValueError(
                    f"weight {name!r} has type {tensor.dtype}; {type(self).__name__} needs plain weights"
                )
            slot.tensor.copy_(tensor)
            loaded.add(slot_name)
        self.note_weights()
        return loaded

    def note_weights(self) -> None:
        """Weights have been filled in: layers that keep something made of theirs make it again."""
        for module in self.modules():
            if isinstance(module, OffsetRMSNorm):
                module.note_weights()

    def missing_weights(self, loaded: set[str]) -> list[str]:
        """Slot names that no checkpoint tensor filled, sorted."""
        return sorted(self.slots().keys() - loaded)
