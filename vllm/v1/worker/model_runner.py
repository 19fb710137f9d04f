"""One step on one device: scheduler output in, sampled tokens out. Layer: L6.

Owns: the order of a step — follow the scheduler, work on blocks, connector, forward, logits, sampling, report. The
parts do the work: `input_batch` (requests), `step_rows` (order), `attn_inputs` (tensors), `kv_connector_step`,
`sampling_rows` and `row_sampler`. Must not know: what a model computes, how pages look, how a worker measures memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.model_loader.loader import get_model
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.attention.backend import CacheLayer, StepMeta
from vllm.v1.core.kv_cache_sharing import check_kv_sharing
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.attn_inputs import StepInputs
from vllm.v1.worker.input_batch import Int64Array, RequestState, RequestStates
from vllm.v1.worker.kv_cache_alloc import KVCachePages, copy_kv_blocks, layer_specs
from vllm.v1.worker.kv_connector_step import ActiveKVConnector, StepConnector, load_arguments
from vllm.v1.worker.prompt_logprobs import PromptLogprobsCollector, wants_prompt_logprobs
from vllm.v1.worker.rank_sampling import sample_on_one_rank
from vllm.v1.worker.row_sampler import RowSampler, SampledRows, describe_failed
from vllm.v1.worker.sampling_rows import SamplingRows
from vllm.v1.worker.step_rows import StepRows, order_rows
from vllm.v1.worker.utils import add_kv_sharing_layers_to_kv_cache_groups


@dataclass(slots=True)
class _PendingStep:
    """What `execute_model` leaves for `sample_tokens`."""

    rows: StepRows
    logits: Tensor | None
    prompt_logprobs: dict[str, Any]  # request → LogprobsTensors
    prompt_token_id_logprobs: dict[str, Any]  # request → rows of floats
    kv_connector_output: KVConnectorOutput | None


class ModelRunner:
    """Runs steps. `load_model` → `get_kv_cache_spec` → `initialize_kv_cache` → (`execute_model` → `sample_tokens`)*.

    A step that raises is forgotten as a whole, and its requests get no rows until the scheduler has ended them; all
    others go on, also in steps that were already queued.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.device = device
        model_config = vllm_config.model_config
        assert model_config is not None  # a worker without a model has nothing to run
        self.vocab_size = model_config.get_vocab_size()
        self.max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        logitsprocs = build_logitsprocs(
            vllm_config, device, is_pin_memory_available(), False, model_config.logits_processors or ()
        )
        self.sampler = Sampler(model_config.logprobs_mode)
        self.sampling = SamplingRows(self.vocab_size, device, logitsprocs)
        self.row_sampler = RowSampler(self.sampler)
        self.prompt_logprobs = PromptLogprobsCollector(
            self.vocab_size, self._compute_logits, model_config.logprobs_mode
        )
        # A `ServableModel`; the loader's return type is open because models are an open set.
        self.model: Any = None
        self.pages: KVCachePages | None = None
        # The cache layers that have pages of their own, by name.
        self.owners: dict[str, CacheLayer] = {}
        self.connector: StepConnector | None = None
        self.states = RequestStates(0, 1, [], model_config.seed)
        self.inputs = StepInputs([], 1, 1, device)
        self._pending: _PendingStep | None = None

    # -- life cycle -------------------------------------------------------------------------------

    def load_model(self) -> None:
        """Build the model and fill it with weights."""
        self.model = get_model(self.vllm_config)

    def get_model(self) -> nn.Module:
        """The loaded model."""
        if self.model is None:
            raise RuntimeError("the model is not loaded")
        model: nn.Module = self.model
        return model

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Every cache of the model with its spec."""
        self.get_model()
        specs: dict[str, KVCacheSpec] = self.model.kv_specs()
        return specs

    def get_kv_sharing_layers(self) -> dict[str, str]:
        """Layers that read the cache of another layer, with that layer; `ValueError` for one that cannot."""
        self.get_model()
        targets: dict[str, str] = self.model.kv_sharing()
        check_kv_sharing({name: layer.kv_spec() for name, layer in self.model.cache_layers.items()}, targets)
        return targets

    def _bind(
        self, raw: dict[str, Tensor], specs: dict[str, KVCacheSpec], groups: Sequence[KVCacheGroupSpec]
    ) -> list[KVCacheGroupSpec]:
        """Hand the model its pages; the groups with the layers that share a cache.

        Those get the pages of the cache's owner here and nowhere else: whoever copies or clears blocks knows owners.
        """
        sharing = self.get_kv_sharing_layers()
        joined = [replace(group, layer_names=list(group.layer_names)) for group in groups]
        add_kv_sharing_layers_to_kv_cache_groups(sharing, joined)
        self.model.bind_kv_caches(
            raw | {name: raw[owner] for name, owner in sharing.items()},
            specs | {name: specs[owner] for name, owner in sharing.items()},
        )
        return joined

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, layout: KVCacheLayout) -> None:
        """Allocate the pages, bind them into the model and the connector, and make room for the requests."""
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        memory_pool = None if connector is None else connector.get_mem_pool_context()
        with memory_pool or nullcontext():
            self.pages = KVCachePages(kv_cache_config, self.device, layout)
        groups = kv_cache_config.kv_cache_groups
        readers = self._bind(self.pages.raw, layer_specs(kv_cache_config), groups)
        self.owners = {name: self.model.cache_layers[name] for name in self.pages.raw}
        model_config = self.vllm_config.model_config
        assert model_config is not None
        max_model_len = model_config.max_model_len
        assert max_model_len is not None
        widths = [g.kv_cache_spec.max_num_blocks_per_req(self.vllm_config, max_model_len) for g in groups]
        replay_tokens = max((group.kv_cache_spec.prefix_replay_tokens for group in groups), default=0)
        self.states = RequestStates(
            self.max_num_reqs, max_model_len, widths, model_config.seed, replay_tokens
        )
        self.inputs = StepInputs(readers, self.max_num_tokens, self.max_num_reqs, self.device)
        if connector is not None:
            connector.register_kv_caches(self.pages.raw)
            connector.set_host_xfer_buffer_ops(copy_kv_blocks)
            self.connector = StepConnector(ActiveKVConnector(connector))

    # -- one step ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the forward pass; None: call `sample_tokens`. A step without tokens is complete by itself."""
        self._pending = None
        try:
            if self.connector is not None:
                self.connector.begin(scheduler_output)
            self.states.apply(scheduler_output)
            return self._execute(scheduler_output)
        except BaseException:
            self.states.give_up(scheduler_output.num_scheduled_tokens)
            if self.connector is not None:
                self.connector.salvage(scheduler_output)
            raise

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        self._prepare_blocks(scheduler_output)
        scheduled = self.states.runnable(scheduler_output.num_scheduled_tokens)
        if not scheduled:
            if self.connector is None:
                return EMPTY_MODEL_RUNNER_OUTPUT
            return self.connector.finish_without_forward(scheduler_output)
        rows = order_rows(self.states, scheduled)
        input_ids, meta = self.inputs.build(self.states, rows.slots, rows.query_lens, rows.num_decodes)
        hidden, report = self._forward(scheduler_output, rows, input_ids, meta)
        prompt_logprobs, by_token_id = self._collect_prompt_logprobs(rows, hidden)
        logits = self._logits(rows, hidden)
        self._pending = _PendingStep(rows, logits, prompt_logprobs, by_token_id, report)
        return None

    def _prepare_blocks(self, scheduler_output: SchedulerOutput) -> None:
        """Zero fresh blocks, then copy: a copy's target may be fresh."""
        if self.pages is None:
            return
        if scheduler_output.new_block_ids_to_zero:
            self.pages.zero_blocks(scheduler_output.new_block_ids_to_zero)
        if scheduler_output.kv_cache_block_copies:
            self.pages.copy_blocks(scheduler_output.kv_cache_block_copies)

    def _forward(
        self, scheduler_output: SchedulerOutput, rows: StepRows, input_ids: Tensor, meta: StepMeta
    ) -> tuple[Tensor, KVConnectorOutput | None]:
        connector = self.connector
        if connector is None:
            return self.run_model(input_ids, meta), None
        assert self.pages is not None
        load = load_arguments(scheduler_output, rows.req_ids, rows.slots)
        load["attn_metadata"] = meta
        context = ForwardContext(self.owners, meta)
        with override_forward_context(context):
            connector.pre_forward(scheduler_output, context, load)
            connector.active.wait_for_loads(self.pages.raw)
            hidden = self.run_model(input_ids, meta)
            connector.active.save_layers(self.pages.raw, meta.groups)
            connector.active.end_forward()
        return hidden, connector.finish()

    def run_model(self, input_ids: Tensor, meta: StepMeta) -> Tensor:
        """Final hidden states `[T, D]`."""
        hidden: Tensor = self.model.forward(input_ids, meta.positions, meta)
        return hidden

    def _logits(self, rows: StepRows, hidden: Tensor) -> Tensor | None:
        """Logits of the rows that sample, in the order of `self.sampling`; None if there are none."""
        self.sampling.update(rows.sampling_requests)
        if not len(self.sampling):
            return None
        row_of_slot = np.empty(len(self.states.num_tokens), dtype=np.int64)
        row_of_slot[rows.slots] = np.arange(len(rows.slots))
        last_tokens = self.inputs.query_start[row_of_slot[self.sampling.slots] + 1] - 1
        if len(last_tokens) != hidden.shape[0] or (np.diff(last_tokens) != 1).any():
            hidden = hidden[torch.from_numpy(last_tokens).to(self.device)]
        return self._compute_logits(hidden)

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.compute_logits(hidden)
        return logits

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | None:
        """Complete the step that `execute_model` began; None if none is waiting."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        try:
            output = self._sample(pending, grammar_output)
        except BaseException:
            self.states.give_up(pending.rows.req_ids)
            raise
        if self.connector is not None:
            self.connector.deliver()
        return output

    def _sample(self, pending: _PendingStep, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        req_ids = [request.req_id for request in self.sampling.requests]
        if pending.logits is None:
            return self._output(pending, req_ids, SampledRows([], None, {}))
        logits = pending.logits

        def sample() -> SampledRows:
            metadata = self.sampling.metadata(self.states)
            return self.row_sampler.sample(logits, self.sampling, metadata, grammar_output)

        sampled = sample_on_one_rank(get_tp_group(), self.device, len(req_ids), sample)
        self.states.append_sampled(self.sampling.requests, self.sampling.slots, sampled.tokens)
        return self._output(pending, req_ids, sampled)

    @staticmethod
    def _output(pending: _PendingStep, sampling_ids: list[str], sampled: SampledRows) -> ModelRunnerOutput:
        """Sampling requests come first, so that rows of log probabilities and of requests agree."""
        req_ids = list(sampling_ids)
        tokens = [[token] for token in sampled.tokens]
        for row in sampled.failed:
            tokens[row] = []
        if len(req_ids) < len(pending.rows.req_ids):
            present = set(req_ids)
            req_ids += [req_id for req_id in pending.rows.req_ids if req_id not in present]
            tokens += [[] for _ in range(len(req_ids) - len(present))]
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=tokens,
            logprobs=sampled.logprobs,
            prompt_logprobs_dict=pending.prompt_logprobs,
            prompt_token_id_logprobs_dict=pending.prompt_token_id_logprobs,
            kv_connector_output=pending.kv_connector_output,
            num_nans_in_logits=describe_failed(sampling_ids, sampled.failed),
        )

    def _collect_prompt_logprobs(
        self, rows: StepRows, hidden: Tensor
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Prompt log probabilities of the requests whose prompt ends in this step."""
        finished: dict[str, Any] = {}
        by_token_id: dict[str, Any] = {}
        for row, request in enumerate(rows.requests):
            # A resumed request reported its prompt before it was preempted.
            if not wants_prompt_logprobs(request.sampling_params) or request.output_token_ids:
                continue
            first, end = self.inputs.query_start[row], self.inputs.query_start[row + 1]
            start = int(rows.context[row])
            self._add_prompt_logprobs(request, start, hidden[first:end])
            if start + int(end - first) >= request.num_prompt_tokens:
                collected, request.prompt_logprobs = request.prompt_logprobs, None
                assert collected is not None
                if collected.tensors is not None:
                    finished[request.req_id] = collected.tensors
                if collected.specific is not None:
                    by_token_id[request.req_id] = collected.specific.tolist()
        return finished, by_token_id

    def _add_prompt_logprobs(self, request: RequestState, start: int, hidden: Tensor) -> None:
        params, prompt = request.sampling_params, request.prompt_token_ids
        if request.prompt_logprobs is None:
            request.prompt_logprobs = self.prompt_logprobs.start(params, prompt)
        self.prompt_logprobs.add(request.prompt_logprobs, params, prompt, start, hidden)

    # -- outside of steps -------------------------------------------------------------------------

    @torch.inference_mode()
    def profile_run(self, num_tokens: int) -> None:
        """A prefill of `num_tokens` made-up tokens with its logits, before there is a KV cache: for measuring memory.

        Every cache is bound to a lone null page, so nothing is written. `initialize_kv_cache` must follow.
        """
        specs = self.get_kv_cache_spec()
        pages = {
            name: torch.zeros(1, spec.page_size_bytes, dtype=torch.int8, device=self.device)
            for name, spec in specs.items()
        }
        groups = self._bind(pages, specs, [KVCacheGroupSpec([name], spec) for name, spec in specs.items()])
        self.inputs = StepInputs(groups, num_tokens, 1, self.device)
        self.states = RequestStates(1, num_tokens, [num_tokens] * len(groups), 0)
        self.dummy_run(num_tokens)

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int) -> None:
        """One forward of a made-up prompt without blocks, and its logits: touches what a first step would set up."""
        input_ids, meta = self._dummy_inputs(np.zeros(1, dtype=np.int64), num_tokens)
        self._compute_logits(self.run_model(input_ids, meta)[-1:])

    def dummy_decode(self, num_rows: int) -> tuple[Tensor, StepMeta]:
        """Inputs of a decode step at the greatest length, of made-up requests without blocks."""
        assert self.vllm_config.model_config is not None
        length = self.vllm_config.model_config.max_model_len
        assert length is not None
        return self._dummy_inputs(np.full(num_rows, length - 1, dtype=np.int64), 1)

    def _dummy_inputs(self, context: Int64Array, num_tokens: int) -> tuple[Tensor, StepMeta]:
        """Rows with `context` computed tokens and `num_tokens` new ones; every block is the null block."""
        num_rows, length = len(context), int(context.max()) + num_tokens
        widths = [table.ids.shape[1] for table in self.states.block_tables.tables]
        states = RequestStates(num_rows, length, widths, 0)
        states.tokens = np.zeros((num_rows, length), dtype=np.int32)
        states.num_tokens[:] = length
        states.num_computed[:] = context
        rows = np.arange(num_rows)
        num_decodes = num_rows if num_tokens == 1 and context.all() else 0
        return self.inputs.build(states, rows, np.full(num_rows, num_tokens, dtype=np.int64), num_decodes)

    def drop_kv_cache(self) -> None:
        """Give the KV memory back (host memory); every block is worthless from now on."""
        if self.pages is None:
            return
        if self.connector is not None:
            self.connector.active.kv_connector.unregister_kv_caches()
        self.pages.release()

    def restore_kv_cache(self) -> None:
        """Use the KV memory again."""
        if self.connector is not None:
            self.connector.active.kv_connector.restore_kv_caches()

    def shutdown(self) -> None:
        """Let go of model and pages."""
        self._pending = None
        self.connector = None
        self.model = None
        self.pages = None
