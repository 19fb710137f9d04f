"""KV events of what a manager from outside has stored and removed.

Owns what was said of each key, for consumers that come late. It must not know managers. Layer L4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from vllm.distributed.kv_event_types import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.block_hash import maybe_convert_block_hash
from vllm.v1.core.block_index import StoredBlockInfo
from vllm.v1.kv_offload.base import (
    OffloadingEvent,
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
)

VOID_TOLD_MAX = 65_536
"""Contents of which is remembered that a reset's word of their end was enough."""


@dataclass(frozen=True, slots=True)
class OffloadingEventGroupSpec:
    """What events say about a group of layers."""

    kv_cache_spec_kind: str | None
    kv_cache_spec_sliding_window: int | None


class OffloadingEventsTracker:
    """Turns a manager's events into KV events, one for each key.

    ``self_describing``: where it is known, events carry tokens and parent; else only the hash. Not ``is_enabled``: nobody
    hears of any, and nothing is remembered.
    """

    def __init__(
        self,
        groups: Mapping[int, OffloadingEventGroupSpec],
        *,
        self_describing: bool,
        is_enabled: bool = True,
    ) -> None:
        self._is_enabled = is_enabled
        self._groups = dict(groups)
        self._self_describing = self_describing
        self._infos: dict[OffloadKey, StoredBlockInfo] = {}
        self._told: dict[tuple[OffloadKey, str], BlockStored] = {}
        # Told before a reset: if the manager does not say that it went, this does.
        self._void: dict[tuple[OffloadKey, str], BlockStored] = {}
        # That it went was told by this: a manager that says so later is not heard a second time.
        self._void_told: dict[tuple[OffloadKey, str], None] = {}

    def describe(self, key: OffloadKey, info: StoredBlockInfo | None) -> None:
        """Content that is being stored under this key stands for these tokens."""
        if info is not None and self._self_describing and self._is_enabled:
            self._infos[key] = info

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """These stores are over and told of, or will never be."""
        for key in keys:
            self._infos.pop(key, None)

    def keep_only(self, keys: Collection[OffloadKey]) -> None:
        """Of these keys alone something may be told yet."""
        if self._infos:
            self._infos = {key: info for key, info in self._infos.items() if key in keys}

    def convert(self, events: Iterable[OffloadingEvent]) -> list[KVCacheEvent]:
        """The same as KV events."""
        converted: list[KVCacheEvent] = []
        if not self._is_enabled:
            return converted
        for event in events:
            for key in event.keys:
                if not event.removed:
                    if not self._is_known(key, event.medium):
                        converted.append(self._stored(key, event))
                elif (key, event.medium) in self._void_told:
                    del self._void_told[key, event.medium]
                else:
                    converted.append(self._removed(key, event))
        if self._void:
            converted += self._end_void()
        return converted

    def _is_known(self, key: OffloadKey, medium: str) -> bool:
        """Whether consumers have it as stored: it is not told twice, nor withdrawn if it came back after a reset."""
        void = self._void.pop((key, medium), None)
        if void is not None:
            self._told[key, medium] = void
        return (key, medium) in self._told

    def _end_void(self) -> list[KVCacheEvent]:
        void, self._void = self._void, {}
        self._void_told |= dict.fromkeys(void)
        for place in list(self._void_told)[:-VOID_TOLD_MAX]:
            del self._void_told[place]
        return [
            self._removed(key, OffloadingEvent([key], medium, True, told.locality, told.ownership))
            for (key, medium), told in void.items()
        ]

    def present(self) -> list[BlockStored]:
        """All that was told as stored and not as removed since."""
        return list(self._told.values())

    def clear(self) -> None:
        """Nothing of it is there any more."""
        self._void |= self._told
        self._told.clear()

    def _stored(self, key: OffloadKey, event: OffloadingEvent) -> BlockStored:
        group = get_offload_group_idx(key)
        about = self._groups.get(group, OffloadingEventGroupSpec(None, None))
        info = self._infos.get(key)
        parent = None if info is None else info.parent_block_hash
        told = BlockStored(
            block_hashes=[maybe_convert_block_hash(get_offload_block_hash(key))],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=[] if info is None else list(info.token_ids),
            block_size=0 if info is None else info.block_size,
            lora_id=None if info is None else info.lora_id,
            medium=event.medium,
            lora_name=None if info is None else info.lora_name,
            extra_keys=None if info is None or not info.extra_keys else [info.extra_keys],
            group_idx=group,
            kv_cache_spec_kind=about.kv_cache_spec_kind,
            kv_cache_spec_sliding_window=about.kv_cache_spec_sliding_window,
            locality=event.locality,
            ownership=event.ownership,
        )
        self._told[key, event.medium] = told
        self._void_told.pop((key, event.medium), None)
        return told

    def _removed(self, key: OffloadKey, event: OffloadingEvent) -> BlockRemoved:
        self._told.pop((key, event.medium), None)
        self._void.pop((key, event.medium), None)
        return BlockRemoved(
            block_hashes=[maybe_convert_block_hash(get_offload_block_hash(key))],
            medium=event.medium,
            group_idx=get_offload_group_idx(key),
            locality=event.locality,
            ownership=event.ownership,
        )
