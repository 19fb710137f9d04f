"""Builds the model that a configuration names and fills it.

Owns: the choice of the weight source, the checks after loading. Must not know: models, file formats. Layer L6.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from vllm._custom_ops import has_native_ops
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import WeightHolder
from vllm.model_executor.layers.sharding import Weight
from vllm.model_executor.model_loader.dummy import fill_random
from vllm.model_executor.model_loader.gguf import iter_gguf
from vllm.model_executor.model_loader.weight_utils import find_safetensors, iter_safetensors
from vllm.model_executor.models.interfaces import NativeModel, config_dict
from vllm.model_executor.models.registry import ModelRegistry
from vllm.transformers_utils.config import ModelSource, find_gguf_file

__all__ = ["check_parallel", "get_model"]

logger = init_logger(__name__)

_NAMES_SHOWN = 8


def get_model(vllm_config: Any) -> NativeModel:
    """The model of `vllm_config.model_config`, weights loaded by `load_config.load_format`, ready for inference.

    In a tensor-parallel group it is this rank's part of the model.

    Raises:
        ValueError: unknown architecture or format, parallel sizes that the model or this process cannot serve, missing
            weights, a weight without a place or of a wrong shape. The message names it.
    """
    check_parallel(vllm_config)
    _check_group(vllm_config.parallel_config)
    model_cls = ModelRegistry.resolve_model_cls(vllm_config.model_config.architectures)
    started = time.monotonic()
    with torch.inference_mode():
        model: NativeModel = model_cls(vllm_config)
        load_format = vllm_config.load_config.load_format
        if load_format == "dummy":
            fill_random(model, vllm_config.model_config.seed or 0, model.slots())
            model.note_weights()
        else:
            _load(model, _weights(vllm_config, load_format), vllm_config.model_config.model)
        if has_native_ops():
            _narrow(model)
    size = sum(p.nbytes for p in model.parameters())
    logger.info("Model loaded: %.2f GiB of weights in %.1f s", size / 2**30, time.monotonic() - started)
    return model.eval()


def _narrow(model: NativeModel) -> None:
    """Halves the weights that lose nothing by it; the torch reference ops would widen them again at every call."""
    for module in model.modules():
        if isinstance(module, WeightHolder):
            module.narrow_weights()


def check_parallel(vllm_config: Any) -> None:
    """`ValueError` naming the parallel size that the model cannot be spread over; needs neither weights nor ranks."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if parallel.pipeline_parallel_size != 1:
        raise ValueError(
            f"pipeline_parallel_size {parallel.pipeline_parallel_size} is not supported: no model runs in stages"
        )
    model_cls = ModelRegistry.resolve_model_cls(model.architectures)
    model_cls.check_split(config_dict(model.hf_config), parallel.tensor_parallel_size)


def _check_group(parallel: Any) -> None:
    size = get_tp_group().size
    if parallel.tensor_parallel_size != size:
        raise ValueError(
            f"tensor_parallel_size {parallel.tensor_parallel_size}, but this process belongs to a group of {size} ranks"
        )


def _weights(vllm_config: Any, load_format: str) -> Iterator[tuple[str, Weight]]:
    """Tensors under checkpoint names, from wherever the model is."""
    model, load = vllm_config.model_config, vllm_config.load_config
    show_progress = load.use_tqdm_on_load and get_tp_group().rank == 0
    gguf_file = find_gguf_file(model.model)
    if load_format == "gguf" and gguf_file is None:
        raise ValueError(f"load_format 'gguf': model {model.model!r} is no GGUF file and holds none")
    if gguf_file is not None and load_format in ("auto", "gguf"):
        return iter_gguf(gguf_file, show_progress)
    if load_format not in ("auto", "safetensors"):
        raise ValueError(
            f"load_format {load_format!r} is not supported; supported: auto, safetensors, gguf, dummy"
        )
    files = find_safetensors(ModelSource(model.model, model.revision, model.hf_token, load.download_dir))
    return iter_safetensors(files, show_progress)


def _load(model: NativeModel, weights: Iterator[tuple[str, Weight]], source: str) -> None:
    missing = model.missing_weights(model.load_weights(weights))
    if missing:
        shown = ", ".join(missing[:_NAMES_SHOWN])
        raise ValueError(
            f"model {source!r} lacks {len(missing)} weights: {shown}{', …' * (len(missing) > _NAMES_SHOWN)}"
        )
