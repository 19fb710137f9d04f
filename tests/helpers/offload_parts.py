"""Parts of the offload rig: specs, the fake model's bytes, a copy backend that waits to be told, a real config."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_event_publisher import EventPublisher
from vllm.distributed.kv_event_types import EventBatch, KVCacheEvent
from vllm.outputs import RequestError
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.simple_kv_offload.copy_backends.base import CopyJob, Regions
from vllm.v1.simple_kv_offload.copy_backends.host_copy import HostCopier

BLOCK = 4
STEP_FAILED = RequestError("step_failed", "the step failed")


@dataclass(frozen=True)
class Byte:
    """Stands for a dtype of one byte."""

    itemsize: int = 1


def full(block: int = BLOCK) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=4, dtype=Byte())


def window(block: int = BLOCK, size: int = 8) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=block, num_kv_heads=1, head_size=4, dtype=Byte(), sliding_window=size)


def mamba(block: int = BLOCK) -> KVCacheSpec:
    return MambaSpec(block, ((8 * block,),), (Byte(),), mamba_cache_mode="align")


def ring(capacity: int = BLOCK) -> KVCacheSpec:
    return CircularBufferSpec(
        block_size=capacity, num_kv_heads=1, head_size=4, dtype=Byte(), dcp_sharded=False
    )


def prefix_bytes(tokens: Sequence[int], place: str, size: int) -> torch.Tensor:
    """The bytes that belong where a prefix ends: a function of all its tokens."""
    digest = hashlib.shake_128(repr((list(tokens), place)).encode()).digest(size)
    return torch.frombuffer(bytearray(digest), dtype=torch.int8)


def next_token(tokens: Sequence[int]) -> int:
    """The fake model's choice."""
    return 100 + int.from_bytes(hashlib.sha256(repr(list(tokens)).encode()).digest()[:2], "big") % 400


class HeldMover:
    """A copy backend that copies when the test says so, and fails what the test wants to fail."""

    def __init__(self, device: Regions, tier: Regions) -> None:
        self._copier = HostCopier(device, tier)
        self.jobs: list[CopyJob] = []
        self.launched: list[CopyJob] = []
        self.fail_next: list[Exception] = []
        self.closed = False

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: list[Any],
        wait_event: Any = None,
    ) -> None:
        job = CopyJob(tuple(src_blocks), tuple(dst_blocks), is_store, event_idx)
        events_list.append((event_idx, job.result))
        self.jobs.append(job)
        self.launched.append(job)

    def release(self, count: int | None = None, *, loads: bool = True, stores: bool = True) -> None:
        """Carry out the oldest jobs (all of the wanted directions by default)."""
        wanted = [job for job in self.jobs if (stores if job.is_store else loads)]
        for job in wanted[:count]:
            self.jobs.remove(job)
            if self.fail_next:
                job.result.resolve(self.fail_next.pop(0))
                continue
            self._copier.wait_and_copy(job)

    def shutdown(self) -> None:
        self.closed = True


class Captured(EventPublisher):
    """Keeps every published event."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[KVCacheEvent] = []

    def publish(self, events: EventBatch) -> None:
        self.events.extend(events.events)

    def shutdown(self) -> None:
        return


def rig_config(
    *,
    ranks: int = 1,
    block: int = BLOCK,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    policy: str = "recompute",
    events: bool = False,
    caching: bool = True,
    looks_ahead: bool = False,
    speculative: Any = None,
    match_unit: int | None = None,
    extra: dict[str, Any] | None = None,
) -> VllmConfig:
    """A real config around a model that exists only in name."""
    model = SimpleNamespace(
        max_model_len=512, original_max_model_len=512, is_hybrid=False, is_attention_free=False,
        model="m", revision=None, hf_token=None,
        is_encoder_decoder=False, is_multimodal_model=False, multimodal_config=None, runner_type="generate",
        skip_tokenizer_init=True, supports_kv_cache_grouping=False, enforce_eager=True, use_mla=False,
        dtype=None, quantization=None, uses_mrope=False,
    )  # fmt: skip
    config = VllmConfig(
        model_config=model,  # type: ignore[arg-type]
        cache_config=CacheConfig(
            block_size=block, enable_prefix_caching=caching, prefix_match_unit=match_unit
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=512,
            is_encoder_decoder=False,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=min(max_num_seqs, max_num_batched_tokens),
            async_scheduling=looks_ahead,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="SimpleCPUOffloadConnector",
            kv_role="kv_both",
            engine_id="rig",
            kv_connector_extra_config=extra or {},
            kv_load_failure_policy=policy,  # type: ignore[arg-type]
        ),
        speculative_config=speculative,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=events, publisher="null"),
    )
    config.cache_config.kv_cache_layout = "BLHNC"
    config.parallel_config.world_size = ranks
    return config
