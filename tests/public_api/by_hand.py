"""Objects as outside code builds them: public constructors only, no helper of the product."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
EOS = 50256


@cache
def model_folder() -> Path:
    """A model of which only the config exists."""
    folder = Path(mkdtemp(prefix="public-api-model-"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "vocab_size": 60000,
        "max_position_embeddings": 8192,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def full(block_size: int = BLOCK) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)


def window(size: int, block_size: int = BLOCK) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=size
    )


def mamba(block_size: int = BLOCK) -> MambaSpec:
    return MambaSpec(block_size, ((1, 1),), (torch.float32,), mamba_cache_mode="align")


def kv_config(*specs: KVCacheSpec, num_blocks: int = 10000) -> KVCacheConfig:
    """One group per spec, for the scheduler only: no tensors."""
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs or (full(),))]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def vllm_config(**changes: Any) -> VllmConfig:
    """A config with a model of which only the config file exists; `changes` are fields of VllmConfig."""
    scheduler = SchedulerConfig.default_factory(
        max_num_seqs=16, max_num_batched_tokens=8192, max_model_len=8192, async_scheduling=False
    )
    return VllmConfig(
        **{
            "model_config": ModelConfig(
                str(model_folder()), skip_tokenizer_init=True, dtype="float16", seed=42
            ),
            "scheduler_config": scheduler,
            "cache_config": CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            **changes,
        }
    )


def scheduler(config: VllmConfig | None = None, kv: KVCacheConfig | None = None, **changes: Any) -> Scheduler:
    config = config or vllm_config()
    kv = kv or kv_config()
    config.cache_config.num_gpu_blocks = kv.num_blocks
    return Scheduler(
        **{
            "vllm_config": config,
            "kv_cache_config": kv,
            "structured_output_manager": StructuredOutputManager(config),
            "block_size": BLOCK,
            "hash_block_size": BLOCK,
            "log_stats": True,
            **changes,
        }
    )


def request(
    request_id: str, prompt: list[int], max_tokens: int = 16, block_size: int = BLOCK, **params: Any
) -> Request:
    init_none_hash(sha256)
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    sampling.update_from_generation_config({}, EOS)
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=get_request_block_hasher(block_size, sha256),
    )


def manager(kv: KVCacheConfig, scheduler_block_size: int = BLOCK, **changes: Any) -> KVCacheManager:
    return KVCacheManager(
        kv,
        **{
            "max_model_len": 8192,
            "scheduler_block_size": scheduler_block_size,
            "hash_block_size": scheduler_block_size,
            "enable_caching": True,
            **changes,
        },
    )


def runner_output(
    output: SchedulerOutput, token: int = 7, connector: KVConnectorOutput | None = None, **tokens: list[int]
) -> ModelRunnerOutput:
    """What a model would return for a step: `token` for every request, unless `tokens` names others."""
    ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[tokens.get(request_id, [token]) for request_id in ids],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=None,
        kv_connector_output=connector,
    )
