"""The public names of the package, resolved on first use, so that `import vllm` loads neither torch nor a model library."""

from __future__ import annotations

from typing import Any

from vllm import envs as envs
from vllm.utils.registry import resolve_object
from vllm.version import __version__, __version_tuple__

_PUBLIC = {
    "AsyncEngineArgs": "vllm.engine.arg_utils:AsyncEngineArgs",
    "AsyncLLMEngine": "vllm.v1.engine.async_llm:AsyncLLM",
    "ClassificationOutput": "vllm.outputs:ClassificationOutput",
    "ClassificationRequestOutput": "vllm.outputs:ClassificationRequestOutput",
    "CompletionOutput": "vllm.outputs:CompletionOutput",
    "EmbeddingOutput": "vllm.outputs:EmbeddingOutput",
    "EmbeddingRequestOutput": "vllm.outputs:EmbeddingRequestOutput",
    "EngineArgs": "vllm.engine.arg_utils:EngineArgs",
    "LLM": "vllm.entrypoints.llm:LLM",
    "LLMEngine": "vllm.v1.engine.llm_engine:LLMEngine",
    "ModelRegistry": "vllm.model_executor.models.registry:ModelRegistry",
    "PoolingOutput": "vllm.outputs:PoolingOutput",
    "PoolingParams": "vllm.pooling_params:PoolingParams",
    "PoolingRequestOutput": "vllm.outputs:PoolingRequestOutput",
    "PromptType": "vllm.inputs:PromptType",
    "RequestOutput": "vllm.outputs:RequestOutput",
    "SamplingParams": "vllm.sampling_params:SamplingParams",
    "ScoringOutput": "vllm.outputs:ScoringOutput",
    "ScoringRequestOutput": "vllm.outputs:ScoringRequestOutput",
    "TextPrompt": "vllm.inputs:TextPrompt",
    "TokensPrompt": "vllm.inputs:TokensPrompt",
}
__all__ = ["__version__", "__version_tuple__", *sorted(_PUBLIC)]


# The values are of many kinds, so the type checker is told nothing about them here.
def __getattr__(name: str) -> Any:
    target = _PUBLIC.get(name)
    if target is None:
        raise AttributeError(f"module 'vllm' has no attribute {name!r}")
    value = resolve_object(target)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
