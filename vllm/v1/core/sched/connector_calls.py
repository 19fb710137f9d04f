"""The scheduler's calls to its KV connector that take more than one line.

Owns their order.  Must not know queues.  Layer: L5 (scheduler).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_report import TierReport
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request

REMOTE_PREFILL_CACHED_TOKENS = "remote_prefill_cached_tokens"


@contextlib.contextmanager
def connector_of_scheduler(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, given: KVConnectorBase_V1 | None
) -> Iterator[KVConnectorBase_V1 | None]:
    """The connector for a scheduler that is made inside: ``given``, or the configured one, if any.

    It is shut down if the scheduler cannot be made, because some of what it has taken outlives the process (a shared pool).
    """
    transfer, connector = vllm_config.kv_transfer_config, given
    if connector is None and transfer is not None and transfer.kv_connector is not None:
        connector = KVConnectorFactory.create_connector(
            vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config
        )
    try:
        yield connector
    except BaseException:
        if connector is not None:
            connector.shutdown()
        raise


def request_finished(
    connector: KVConnectorBase_V1, manager: KVCacheManager, request: Request, is_producer: bool
) -> tuple[bool, dict[str, Any] | None]:
    """Hand the finished request to the connector.  ``(delay the release of its blocks, parameters for the client)``

    It sees only confirmed tokens and only blocks that a later step could still read.
    """
    request_id, confirmed = request.request_id, request.num_confirmed_tokens
    manager.remove_skipped_blocks(request_id, confirmed, request.num_prompt_tokens)
    block_ids = manager.get_block_ids_for_computed_tokens(request_id, confirmed)
    if is_producer:
        tails = manager.finalize_partial_tail_offloads(request)
        if tails:
            connector.register_finished_partial_tail(request, block_ids, tails)
    if isinstance(connector, SupportsHMA):
        delay, params = connector.request_finished_all_groups(request, block_ids)
    else:
        delay, params = connector.request_finished(request, block_ids[0] if block_ids else [])
    if params is not None:
        params.setdefault(REMOTE_PREFILL_CACHED_TOKENS, request.num_cached_tokens)
    return delay, params


def external_hit_sources(
    connector: KVConnectorBase_V1 | None, request: Request, num_external: int
) -> dict[CacheHitSource, int]:
    """The accepted external tokens by tier; every tier of the connector is named.

    These are figures only: an answer that does not add up counts as unspecified.
    """
    if connector is None:
        return {}
    sources = dict.fromkeys(tiers_below(connector), 0)
    if num_external:
        told: object = connector.get_external_cache_hit_sources(request, num_external)
        if not isinstance(told, Mapping) or sum(told.values()) != num_external:
            told = {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external}
        sources.update(told)
    return sources


def tiers_below(connector: KVConnectorBase_V1 | None) -> tuple[CacheHitSource, ...]:
    """The tiers behind the device. Stand-ins, which know only the calls of the contract, name none."""
    return connector.get_cache_hit_sources() if isinstance(connector, KVConnectorBase_V1) else ()


def tier_reports(connector: KVConnectorBase_V1 | None) -> Sequence[TierReport]:
    """The state of the tiers behind the device; none of stand-ins."""
    return connector.get_tier_reports() if isinstance(connector, KVConnectorBase_V1) else ()


def given_up_blocks(connector: KVConnectorBase_V1 | None) -> Collection[int]:
    """Device blocks that may come back late or never; none of stand-ins."""
    return connector.given_up_blocks() if isinstance(connector, KVConnectorBase_V1) else ()


def load_source(connector: KVConnectorBase_V1, request: Request) -> CacheHitSource | None:
    """The tier that a load under way of the request reads; None of stand-ins."""
    return connector.load_source(request) if isinstance(connector, KVConnectorBase_V1) else None


def reported_cached_tokens(
    request: Request, num_local: int, external: Mapping[CacheHitSource, int]
) -> tuple[int, Mapping[CacheHitSource, int]]:
    """Cached tokens as the client sees them: ``(local, external by tier)``.

    Where another engine computed the prompt, its hits count and not the transfer; what is no number counts as none.
    """
    params = request.kv_transfer_params
    if params is not None and params.get("do_remote_prefill"):
        remote = params.get(REMOTE_PREFILL_CACHED_TOKENS)
        return 0, {CacheHitSource.EXTERNAL_UNSPECIFIED: remote if isinstance(remote, int) else 0}
    return num_local, external


def build_metadata(connector: KVConnectorBase_V1, manager: KVCacheManager, output: SchedulerOutput) -> None:
    """Let the connector write its orders for this step; it may read block tables only while it does so."""
    output.kv_connector_block_state = KVConnectorBlockState(
        req_ids=set(output.num_scheduled_tokens),
        resolve_block_ids=manager.get_block_ids,
        boundary_state_offloads=manager.take_boundary_state_offloads(),
    )
    output.kv_connector_metadata = connector.build_connector_meta(output)
    output.kv_connector_block_state = None
