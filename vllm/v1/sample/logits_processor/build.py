"""Finds the logits processors of an engine: built-in, from plugins, from the configuration. Layer: L6.

Owns: the order of processors and the checks at start-up. Must not know: rows, batches, sampling.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

import torch

from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.utils.registry import resolve_object
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.sample.logits_processor.state import LogitsProcessors

logger = init_logger(__name__)

LOGITSPROCS_GROUP = "vllm.logits_processors"
STR_POOLING_REJECTS_LOGITSPROCS = "Pooling models do not support custom logits processors."
STR_SPEC_DEC_REJECTS_LOGITSPROCS = (
    "Custom logits processors are not supported when speculative decoding is enabled."
)

BUILTIN_LOGITS_PROCESSORS: tuple[type[LogitsProcessor], ...] = (
    MinTokensLogitsProcessor,
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
)


def _checked(found: object, name: str) -> type[LogitsProcessor]:
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        raise ValueError(f"logits processor {name!r} must be a subclass of LogitsProcessor, got {found!r}")
    return found


def _from_plugins() -> list[type[LogitsProcessor]]:
    allowed = envs.VLLM_PLUGINS
    entries = importlib.metadata.entry_points(group=LOGITSPROCS_GROUP)
    return [
        _checked(entry.load(), entry.name) for entry in entries if allowed is None or entry.name in allowed
    ]


def load_custom_logitsprocs(
    logits_processors: Sequence[str | type[LogitsProcessor]] | None,
) -> list[type[LogitsProcessor]]:
    """Classes from plugins and from the given list of classes and "module:Class" names, without duplicates.

    `ValueError` for something that is no processor, `ImportError` or `AttributeError` for a name that does not exist.
    """
    classes = _from_plugins()
    for item in logits_processors or ():
        found = resolve_object(item) if isinstance(item, str) else item
        classes.append(_checked(found, str(item)))
    return list(dict.fromkeys(classes))


def validate_logits_processors_parameters(
    logits_processors: Sequence[str | type[LogitsProcessor]] | None, sampling_params: SamplingParams
) -> None:
    """Let every custom processor check a request's parameters; `ValueError` from the first that objects."""
    for processor_class in load_custom_logitsprocs(logits_processors):
        processor_class.validate_params(sampling_params)


def build_logitsprocs(
    vllm_config: VllmConfig,
    device: torch.device,
    is_pin_memory: bool,
    is_pooling_model: bool,
    custom_logitsprocs: Sequence[str | type[LogitsProcessor]] = (),
) -> LogitsProcessors:
    """The processors of an engine, built-in ones first.

    `ValueError` if custom ones are asked for where they cannot work: pooling models, speculative decoding.
    """
    if is_pooling_model:
        if custom_logitsprocs:
            raise ValueError(STR_POOLING_REJECTS_LOGITSPROCS)
        return LogitsProcessors()
    if vllm_config.speculative_config is not None and custom_logitsprocs:
        raise ValueError(STR_SPEC_DEC_REJECTS_LOGITSPROCS)
    custom = load_custom_logitsprocs(custom_logitsprocs)
    if custom:
        logger.info("Custom logits processors: %s", ", ".join(c.__name__ for c in custom))
    classes = [*BUILTIN_LOGITS_PROCESSORS, *custom]
    return LogitsProcessors(c(vllm_config, device, is_pin_memory) for c in classes)
