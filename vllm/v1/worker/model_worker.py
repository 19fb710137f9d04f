"""The part of a worker that does not depend on the device: it hands everything to a model runner. Layer: L6.

Owns: the order of start-up. Must not know: devices, memory, what a step does.
"""

from __future__ import annotations

from torch import nn

from vllm.distributed.kv_transfer.kv_transfer_state import (
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
)
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.worker_base import WorkerBase


class ModelWorker(WorkerBase):
    """A worker round a `ModelRunner`; a subclass sets `model_runner` and knows the device."""

    model_runner: ModelRunner

    def load_model(self) -> None:
        self.model_runner.load_model()

    def get_model(self) -> nn.Module:
        return self.model_runner.get_model()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.model_runner.get_kv_cache_spec()

    def get_kv_sharing_layers(self) -> dict[str, str]:
        return self.model_runner.get_kv_sharing_layers()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)
        self.model_runner.initialize_kv_cache(kv_cache_config, self.kv_cache_layout)

    def compile_or_warm_up_model(self) -> None:
        """One tiny forward, so that libraries initialise themselves now."""
        self.model_runner.dummy_run(1)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        output: ModelRunnerOutput | None = self.model_runner.execute_model(scheduler_output)
        return output

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | None:
        output: ModelRunnerOutput | None = self.model_runner.sample_tokens(grammar_output)
        return output

    def execute_dummy_batch(self) -> None:
        self.model_runner.dummy_run(1)

    def shutdown(self) -> None:
        ensure_kv_transfer_shutdown(self.vllm_config)
        self.model_runner.shutdown()
