"""Sampling and the helpers round it (interface section 15)."""

from __future__ import annotations

_SAMPLER = "vllm.v1.sample.sampler:Sampler"
_PROCESSORS = "vllm.v1.sample.logits_processor"
_TOP = "vllm.v1.sample.ops.topk_topp_sampler"

EXPORTS = {
    "vllm.v1.sample.metadata": "SamplingMetadata",
    "vllm.v1.sample.sampler": "Sampler",
    _PROCESSORS: "LogitsProcessor, BatchUpdate, MoveDirectionality.UNIDIRECTIONAL, MoveDirectionality.SWAP, "
    "BatchUpdateBuilder, LogitsProcessors, "
    "build_logitsprocs, MinPLogitsProcessor, LogitBiasLogitsProcessor, MinTokensLogitsProcessor, "
    "AdapterLogitsProcessor, RequestLogitsProcessor, validate_logits_processors_parameters, LOGITSPROCS_GROUP, "
    "STR_POOLING_REJECTS_LOGITSPROCS, STR_SPEC_DEC_REJECTS_LOGITSPROCS",
    f"{_PROCESSORS}.builtin": "process_dict_updates",
    _TOP: "apply_top_k_top_p, apply_top_k_top_p_pytorch, random_sample, TopKTopPSampler",
    "vllm.v1.sample.ops.penalties": "apply_all_penalties",
    "vllm.v1.sample.ops.logprobs": "batched_count_greater_than",
    "vllm.utils.torch_utils": "make_tensor_with_pad, set_random_seed, async_tensor_h2d, set_default_torch_num_threads",
    "vllm.utils.platform_utils": "is_pin_memory_available",
}

SIGNATURES = {
    "vllm.v1.sample.metadata:SamplingMetadata": (
        "temperature, all_greedy, all_random, top_p, top_k, generators, max_num_logprobs, no_penalties, "
        "prompt_token_ids, frequency_penalties, presence_penalties, repetition_penalties, output_token_ids, "
        "allowed_token_ids_mask, bad_words_token_ids, logitsprocs, logprob_token_ids=None, spec_token_ids=None, "
        "thinking_budget_state_holder=None, ..."
    ),
    _SAMPLER: "logprobs_mode='raw_logprobs', use_fp64_gumbel=False",
    f"{_SAMPLER}.forward": "logits, sampling_metadata, predict_bonus_token=False, logprobs_mode_override=None",
    f"{_SAMPLER}.apply_temperature": "logits, temp, all_random",
    f"{_SAMPLER}.greedy_sample": "logits",
    f"{_SAMPLER}.compute_logprobs": "logits",
    f"{_SAMPLER}.gather_logprobs": "logprobs, num_logprobs, token_ids",
    f"{_SAMPLER}.apply_penalties": "logits, _metadata, output_token_ids",
    f"{_SAMPLER}.sample": "logits, _metadata, ...",
    f"{_SAMPLER}.apply_logits_processors": "logits, _metadata, predict_bonus_token",
    f"{_PROCESSORS}:LogitsProcessor": "vllm_config, device, is_pin_memory",
    f"{_PROCESSORS}:LogitsProcessor.apply": "logits",
    f"{_PROCESSORS}:LogitsProcessor.is_argmax_invariant": "",
    f"{_PROCESSORS}:LogitsProcessor.update_state": "batch_update",
    f"{_PROCESSORS}:LogitsProcessor.validate_params": "sampling_params",
    f"{_PROCESSORS}:BatchUpdate": "batch_size, removed, added, moved",
    f"{_PROCESSORS}:BatchUpdateBuilder": "removed=None, added=None, moved=None",
    f"{_PROCESSORS}:BatchUpdateBuilder.get_and_reset": "batch_size",
    f"{_PROCESSORS}:BatchUpdateBuilder.reset": "",
    f"{_PROCESSORS}:LogitsProcessors": "_list=None",
    f"{_PROCESSORS}:build_logitsprocs": (
        "vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs=()"
    ),
    f"{_PROCESSORS}:AdapterLogitsProcessor.new_req_logits_processor": "params",
    f"{_PROCESSORS}.builtin:process_dict_updates": "_entries, batch_update, _new_state",
    f"{_TOP}:apply_top_k_top_p": "logits, k, p, ...",
    f"{_TOP}:apply_top_k_top_p_pytorch": "logits, k, p, allow_cpu_sync=False",
    f"{_TOP}:random_sample": "probs, generators, use_fp64_gumbel=False",
    f"{_TOP}:TopKTopPSampler": "logprobs_mode=_, use_fp64_gumbel=False",
    "vllm.v1.sample.ops.penalties:apply_all_penalties": (
        "logits, _prompt_ids, _presence, _frequency, _repetition, _output_ids"
    ),
    "vllm.v1.sample.ops.logprobs:batched_count_greater_than": "x, values",
    "vllm.utils.torch_utils:make_tensor_with_pad": (
        "_rows, pad, dtype, *, max_len=None, device=None, pin_memory=False"
    ),
    "vllm.utils.torch_utils:set_random_seed": "seed",
    "vllm.utils.torch_utils:async_tensor_h2d": "data, device=None, dtype=None, out=None",
    "vllm.utils.torch_utils:set_default_torch_num_threads": "_n",
    "vllm.utils.platform_utils:is_pin_memory_available": "",
}

MEMBERS = {
    f"{_PROCESSORS}:BatchUpdateBuilder": "removed_append, has_removed, peek_removed, pop_removed",
    f"{_PROCESSORS}:LogitsProcessors": "all",
}

CONSTANTS = {f"{_PROCESSORS}:LOGITSPROCS_GROUP": "vllm.logits_processors"}
