"""Public facade: a model runner's connector calls as a mix-in. Layer: L6.

Owns: nothing but the names. The global connector and the forward context are looked up in this module, so that callers
may replace them here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.kv_connector_step import ActiveKVConnector


class KVConnectorModelRunnerMixin:
    """For runners that wrap their own forward pass; all methods are static."""

    @staticmethod
    def kv_connector_no_forward(
        scheduler_output: SchedulerOutput, vllm_config: VllmConfig
    ) -> ModelRunnerOutput:
        """A step that computes nothing; the shared empty output if the connector has nothing to report."""
        with (
            set_forward_context(None, vllm_config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduler_output) as report,
        ):
            pass
        if report is None or report.is_empty():
            return EMPTY_MODEL_RUNNER_OUTPUT
        return ModelRunnerOutput.with_kv_conn_output_only(report)

    @staticmethod
    @contextmanager
    def maybe_get_kv_connector_output(
        scheduler_output: SchedulerOutput, defer_finalize: bool = False
    ) -> Iterator[KVConnectorOutput | None]:
        """Wrap a forward pass; the yielded record is filled when the block ends. None without a connector.

        With `defer_finalize`, `wait_for_save` and `clear` are left to `finalize_kv_connector`.
        """
        if not has_kv_transfer_group():
            yield None
            return
        active = ActiveKVConnector(get_kv_transfer_group())
        output = KVConnectorOutput()
        try:
            active.begin(scheduler_output)
            active.pre_forward(scheduler_output, get_forward_context(), {})
            yield output
            active.end_forward()
            report = active.finish(
                scheduler_output.finished_req_ids, waits=not defer_finalize, clears=not defer_finalize
            )
        except BaseException:
            active.abandon()
            raise
        vars(output).update(vars(report))

    @staticmethod
    def finalize_kv_connector() -> None:
        """The calls that `defer_finalize` left out."""
        if has_kv_transfer_group():
            connector = get_kv_transfer_group()
            connector.wait_for_save()
            connector.clear_connector_metadata()
