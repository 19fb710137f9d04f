"""Calls the worker half of a KV connector round a forward pass, in the one order the contract fixes. Layer: L6.

`handle_preemptions` → `bind` → [`start_load_kv` if the step has sync loads] → forward (`wait_for_layer_load`,
`save_kv_layer` per layer) → `finish_forward` → [`start_load_kv` otherwise] → `wait_for_save` → `get_transfer_results`
→ load errors → stats → events → worker metadata → `clear`. Steps without a forward make the same calls without the
per-layer ones. Must not know: a concrete connector, models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.forward_context import ForwardContext
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput

logger = init_logger(__name__)

# Pages, attention metadata and load arguments are opaque to whoever calls a connector.
LoadArguments = dict[str, Any]


class ActiveKVConnector:
    """Makes one connector's calls: `begin`, `pre_forward`, the forward, `end_forward`, `finish`; or `no_forward`.

    `abandon` replaces the rest of a step that failed. While disabled, forwards are dummies: nothing is bound, loaded
    or saved.
    """

    def __init__(self, kv_connector: KVConnectorBase_V1) -> None:
        self.kv_connector = kv_connector
        # Stand-ins know only the calls of the contract.
        self._has_layer_calls = (
            not isinstance(kv_connector, KVConnectorBase_V1) or kv_connector.has_layer_calls
        )
        self._disabled = False
        # Arguments of a load that starts once the forward is launched.
        self._pending_load_kwargs: LoadArguments | None = None

    def set_disabled(self, disabled: bool) -> None:
        """Switch the calls off for dummy runs, and on again."""
        self._disabled = disabled

    def begin(self, scheduler_output: SchedulerOutput) -> None:
        """First call of a step, before any block is written: preemptions, then the orders of the step."""
        if self._disabled:
            return
        metadata = scheduler_output.kv_connector_metadata
        if metadata is None:
            raise RuntimeError(
                "a KV connector is active, but the scheduler output carries no metadata for it"
            )
        self._pending_load_kwargs = None
        self.kv_connector.handle_preemptions(metadata)
        self.kv_connector.bind_connector_metadata(metadata)

    def pre_forward(
        self, scheduler_output: SchedulerOutput, forward_context: ForwardContext, load: LoadArguments
    ) -> None:
        """Just before the forward. `load`: keyword arguments of `start_load_kv`, which runs now or in `end_forward`."""
        if self._disabled:
            return
        if scheduler_output.has_sync_kv_loads:
            self.kv_connector.start_load_kv(forward_context, **load)
        else:
            self._pending_load_kwargs = {"forward_context": forward_context, **load}

    def wait_for_loads(self, layer_names: Iterable[str]) -> None:
        """After this, what a sync load restores is usable in all layers."""
        if self._disabled or not self._has_layer_calls:
            return
        for name in layer_names:
            self.kv_connector.wait_for_layer_load(name)

    def save_layers(self, pages: Mapping[str, Any], groups: Mapping[str, Any]) -> None:
        """Offer every layer's pages, with the layer's metadata of the step."""
        if self._disabled or not self._has_layer_calls:
            return
        for name, layer_pages in pages.items():
            self.kv_connector.save_kv_layer(name, layer_pages, groups.get(name))

    def end_forward(self) -> None:
        """The forward was launched."""
        if self._disabled:
            return
        self.kv_connector.finish_forward()
        if self._pending_load_kwargs is not None:
            arguments, self._pending_load_kwargs = self._pending_load_kwargs, None
            self.kv_connector.start_load_kv(**arguments)

    def finish(
        self, finished_req_ids: set[str], waits: bool = True, clears: bool = True
    ) -> KVConnectorOutput | None:
        """The end of the step: what the connector reports, or None while disabled.

        Without `waits` or `clears` the caller makes `wait_for_save` or `clear_connector_metadata` itself, later.
        """
        if self._disabled:
            return None
        connector = self.kv_connector
        if waits:
            connector.wait_for_save()
        results = connector.get_transfer_results(finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=set(results.failed_recving or ()),
        )
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()
        if clears:
            connector.clear_connector_metadata()
        return output

    def abandon(self) -> None:
        """The step failed: its orders are void. Transfers already under way report in a later step."""
        self._pending_load_kwargs = None
        if self.kv_connector.has_connector_metadata():
            self.kv_connector.clear_connector_metadata()

    def no_forward(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """A step that computes nothing; the shared empty output if there is nothing to report."""
        if self._disabled:
            return EMPTY_MODEL_RUNNER_OUTPUT
        load = load_arguments(scheduler_output, [], [])
        try:
            self.begin(scheduler_output)
            self.pre_forward(scheduler_output, ForwardContext({}, None), load)
            self.end_forward()
            return output_of_report(self.finish(scheduler_output.finished_req_ids))
        except BaseException:
            self.abandon()
            raise


class StepConnector:
    """An `ActiveKVConnector` over steps that may fail.

    Orders of a step are carried out even if its forward fails, since the scheduler half counts on their reports; and a
    report that could not be delivered with its own step is part of the next one.
    """

    def __init__(self, active: ActiveKVConnector) -> None:
        self.active = active
        self._finished_req_ids: set[str] = set()
        self._is_load_due = False
        self._undelivered: KVConnectorOutput | None = None

    def begin(self, scheduler_output: SchedulerOutput) -> None:
        """See `ActiveKVConnector.begin`."""
        self._finished_req_ids |= scheduler_output.finished_req_ids
        self._is_load_due = True
        try:
            self.active.begin(scheduler_output)
        except BaseException:
            self.active.abandon()
            raise

    def pre_forward(
        self, scheduler_output: SchedulerOutput, forward_context: ForwardContext, load: LoadArguments
    ) -> None:
        """See `ActiveKVConnector.pre_forward`."""
        self._is_load_due = False
        self.active.pre_forward(scheduler_output, forward_context, load)

    def finish(self) -> KVConnectorOutput | None:
        """The report of this step and of failed ones before it. It stays here until `deliver`."""
        report = self.active.finish(self._finished_req_ids)
        self._finished_req_ids = set()
        if report is not None:
            self._undelivered = report if self._undelivered is None else _joined(self._undelivered, report)
        return self._undelivered

    def deliver(self) -> None:
        """The last report is in the caller's hands."""
        self._undelivered = None

    def finish_without_forward(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """The rest of a step that computes nothing; its output counts as delivered."""
        load = load_arguments(scheduler_output, [], [])
        self.pre_forward(scheduler_output, ForwardContext({}, None), load)
        self.active.end_forward()
        report = self.finish()
        self.deliver()
        return output_of_report(report)

    def salvage(self, scheduler_output: SchedulerOutput) -> None:
        """The step failed: do what is left of the connector's part, and never hide the step's own error."""
        if not self.active.kv_connector.has_connector_metadata():
            return
        try:
            if self._is_load_due:
                load = load_arguments(scheduler_output, [], [])
                self.pre_forward(scheduler_output, ForwardContext({}, None), load)
            self.active.end_forward()
            self.finish()
        except Exception:  # the step's own error is on its way; this one may only be told
            logger.exception("The KV connector could not finish a step that failed")
            self.active.abandon()


def output_of_report(report: KVConnectorOutput | None) -> ModelRunnerOutput:
    """An output without requests; the shared empty one if there is nothing to report."""
    if report is None or report.is_empty():
        return EMPTY_MODEL_RUNNER_OUTPUT
    return ModelRunnerOutput.with_kv_conn_output_only(report)


def _joined(earlier: KVConnectorOutput, later: KVConnectorOutput) -> KVConnectorOutput:
    """One report out of two; cache events of the earlier, failed step are void."""
    aggregator = KVOutputAggregator(1)
    aggregator.ft_defer_kv_connector_outputs([earlier])
    combined = aggregator.aggregate([ModelRunnerOutput([], {}, kv_connector_output=later)])
    assert combined is not None
    assert combined.kv_connector_output is not None
    # The aggregator states its own count of reports; this one says nothing about ranks.
    combined.kv_connector_output.expected_finished_count = later.expected_finished_count
    return combined.kv_connector_output


def load_arguments(scheduler_output: SchedulerOutput, req_ids: list[str], slots: Any) -> LoadArguments:
    """Keyword arguments of `start_load_kv`: the step, its requests in row order and their slots on this worker."""
    return {
        "scheduler_output": scheduler_output,
        "request_state_indices": slots,
        "request_ids": req_ids,
        "num_tokens": scheduler_output.total_num_scheduled_tokens,
    }
