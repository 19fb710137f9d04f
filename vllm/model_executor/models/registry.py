"""Table of model architectures: the names in config.json → "module:Class", imported when chosen.

Owns: the table. Must not know: a model's insides. Layer L6.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.utils.registry import resolve_object

__all__ = ["ModelRegistry"]

_PACKAGE = "vllm.model_executor.models"

_MODELS: dict[str, str] = {
    "Gemma3ForCausalLM": f"{_PACKAGE}.gemma4:Gemma4ForCausalLM",
    "Gemma3ForConditionalGeneration": f"{_PACKAGE}.gemma4:Gemma4ForCausalLM",
    "Gemma4ForCausalLM": f"{_PACKAGE}.gemma4:Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration": f"{_PACKAGE}.gemma4:Gemma4ForCausalLM",
    "Glm5NextForCausalLM": f"{_PACKAGE}.glm5_next:Glm5NextForCausalLM",
    "Glm5NextForConditionalGeneration": f"{_PACKAGE}.glm5_next:Glm5NextForCausalLM",
    "LlamaForCausalLM": f"{_PACKAGE}.llama:LlamaForCausalLM",
    "MistralForCausalLM": f"{_PACKAGE}.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": f"{_PACKAGE}.llama:LlamaForCausalLM",
    "Qwen3ForCausalLM": f"{_PACKAGE}.llama:LlamaForCausalLM",
}


class ModelRegistry:
    """Class-level table; outside packages add a line with `register_model` from their plugin entry point."""

    @staticmethod
    def get_supported_archs() -> list[str]:
        """Architecture names in alphabetical order."""
        return sorted(_MODELS)

    @staticmethod
    def register_model(architecture: str, target: str) -> None:
        """Adds or replaces an entry; `target` is "module:Class" and is imported only when it is chosen."""
        if target.count(":") != 1:
            raise ValueError(f"model {architecture!r}: target must be 'module:Class', got {target!r}")
        _MODELS[architecture] = target

    @staticmethod
    def resolve_model_cls(architectures: str | Iterable[str]) -> Any:
        """The class of the first known architecture; `ValueError` names them and what is supported."""
        names = [architectures] if isinstance(architectures, str) else list(architectures or ())
        for name in names:
            target = _MODELS.get(name)
            if target is not None:
                return resolve_object(target)
        raise ValueError(
            f"architectures {names} are not supported; supported: {', '.join(ModelRegistry.get_supported_archs())}"
        )
