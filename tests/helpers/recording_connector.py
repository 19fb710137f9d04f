"""A worker half that writes down every call, with answers a test can set."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_connector_types import KVConnectorMetadata, KVConnectorTransferResults


class StepOrders(KVConnectorMetadata):
    """Empty orders."""


class RecordingConnector:
    """Answers like a connector that has nothing to do; `calls` holds the names in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.load_arguments: dict[str, Any] = {}
        self.finished_seen: set[str] = set()
        self.results = KVConnectorTransferResults()
        self.failing: str | None = None
        self._metadata: KVConnectorMetadata | None = None

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.failing:
            raise RuntimeError(f"{name} failed")

    def take_calls(self) -> list[str]:
        taken, self.calls = self.calls, []
        return taken

    def handle_preemptions(self, metadata: KVConnectorMetadata) -> None:
        self._call("handle_preemptions")

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        self._metadata = metadata
        self._call("bind")

    def has_connector_metadata(self) -> bool:
        return self._metadata is not None

    def clear_connector_metadata(self) -> None:
        self._metadata = None
        self._call("clear")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.load_arguments = {"forward_context": forward_context, **kwargs}
        self._call("start_load_kv")

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._call(f"wait:{layer_name}")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._call(f"save:{layer_name}")

    def finish_forward(self) -> None:
        self._call("finish_forward")

    def wait_for_save(self) -> None:
        self._call("wait_for_save")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self.finished_seen = set(finished_req_ids)
        self._call("results")
        taken, self.results = self.results, KVConnectorTransferResults()
        return taken

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._call("errors")
        return set()

    def get_kv_connector_stats(self) -> None:
        self._call("stats")

    def get_kv_connector_kv_cache_events(self) -> None:
        self._call("events")

    def build_connector_worker_meta(self) -> None:
        self._call("worker_meta")
