"""The methods of a core that a client may call by name.  Layer L7.

Owns the table; a name that is not in it cannot be called. Must not know sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from vllm.lora.request import LoRARequest
from vllm.v1.engine.core_cache import CacheInquiry
from vllm.v1.engine.core_loop import EngineCore


def utility_methods(core: EngineCore) -> dict[str, Callable[..., Any]]:
    """Name → method. A method may return a future, which is answered when it is done."""
    executor, control = core.model_executor, core.control
    cache = CacheInquiry(core.scheduler, core.request_block_hasher)
    return {
        "add_lora": lambda request: executor.add_lora(msgspec.convert(request, LoRARequest)),
        "check_health": executor.check_health,
        "collective_rpc": executor.collective_rpc,
        "execute_dummy_batch": executor.execute_dummy_batch,
        "get_kv_cache_group_metadata": core.get_kv_cache_group_metadata,
        "get_kv_cache_report": cache.report,
        "get_supported_tasks": core.get_supported_tasks,
        "get_weight_version": core.get_weight_version,
        "is_scheduler_paused": core.is_scheduler_paused,
        "is_sleeping": core.is_sleeping,
        "list_loras": executor.list_loras,
        "lookup_kv_cache": lambda ids, salt=None, lora=None: cache.lookup(
            ids, salt, None if lora is None else msgspec.convert(lora, LoRARequest)
        ),
        "pause_scheduler": core.pause_scheduler,
        "pin_lora": executor.pin_lora,
        "profile": executor.profile,
        "release_kv_cache_memory": control.release_kv_cache_memory,
        "remove_lora": executor.remove_lora,
        "reset_encoder_cache": control.reset_encoder_cache,
        "reset_mm_cache": control.reset_mm_cache,
        "reset_prefix_cache": core.reset_prefix_cache,
        "reset_prefix_cache_detailed": control.reset_prefix_cache_detailed,
        "resume_scheduler": core.resume_scheduler,
        "save_sharded_state": executor.save_sharded_state,
        "set_weight_version": core.set_weight_version,
        "sleep": core.sleep,
        "wake_up": core.wake_up,
    }
