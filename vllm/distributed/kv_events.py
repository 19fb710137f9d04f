"""Public facade over the KV event types and publishers. Layer L7."""

from vllm.distributed.kv_event_publisher import (
    EventPublisher,
    EventPublisherFactory,
    NullEventPublisher,
)
from vllm.distributed.kv_event_types import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ExternalBlockHash,
    KVCacheEvent,
    KVConnectorKVEvents,
    KVEventAggregator,
    KVEventBatch,
)
from vllm.distributed.kv_event_zmq import ZmqEventPublisher

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_GPU",
    "MEDIUM_STORAGE",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventPublisher",
    "EventPublisherFactory",
    "ExternalBlockHash",
    "KVCacheEvent",
    "KVConnectorKVEvents",
    "KVEventAggregator",
    "KVEventBatch",
    "NullEventPublisher",
    "ZmqEventPublisher",
]
