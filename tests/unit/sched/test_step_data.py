"""What workers, clients and connectors are told: runner forms, log probabilities, pooling, pipeline stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.sched import Driver, full, kv_config, make_request, make_scheduler, mamba, sched_config
from tests.helpers.sched_connector import FakeConnector, LoadRunner
from vllm.config import KVEventsConfig
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestError
from vllm.pooling_params import PoolingParams
from vllm.v1.core.sched.connector_calls import request_finished
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.params import CacheShape, params_from_config
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_connector_types import KVConnectorStats
from vllm.v1.message_types import FinishReason
from vllm.v1.outputs import (
    DraftTokenIds,
    KVConnectorOutput,
    LogprobsLists,
    ModelRunnerOutput,
    SamplingMaskLists,
)
from vllm.v1.request import Request, RequestStatus


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7 + i * 3) % 50 for i in range(length)]


def result(*rows: tuple[str, list[int]], **fields: Any) -> ModelRunnerOutput:
    ids = [name for name, _ in rows]
    return ModelRunnerOutput(
        ids, {name: i for i, name in enumerate(ids)}, [tokens for _, tokens in rows], **fields
    )


def test_log_probabilities_and_masks_reach_the_request_that_asked() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request(scheduler, "a", prompt(5), logprobs=1))
    scheduler.add_request(make_request(scheduler, "b", prompt(6)))
    output = scheduler.schedule()
    lists = LogprobsLists(
        np.array([[1, 2, 9], [3, 4, 9]], np.int32), np.zeros((2, 3), np.float32), np.array([5, 6], np.int32)
    )
    masks = SamplingMaskLists(np.arange(4, dtype=np.int32), np.array([0, 1, 4]))
    messages = scheduler.update_from_output(
        output, result(("b", [7]), ("a", [8]), logprobs=lists, sampling_masks=masks)
    )
    by_id = {entry.request_id: entry for entry in messages[0].outputs}
    assert by_id["b"].new_logprobs is None
    # As wide as asked for, however wide a neighbour's row is.
    assert by_id["a"].new_logprobs.logprob_token_ids.tolist() == [[3, 4]]  # type: ignore[union-attr]
    assert by_id["a"].new_logprobs.logprobs.shape == (1, 2)  # type: ignore[union-attr]
    assert by_id["a"].new_sampling_mask.token_ids.tolist() == [1, 2, 3]  # type: ignore[union-attr]


def test_prompt_log_probabilities_are_sent_even_with_a_prefill_chunk() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add_request(make_request(scheduler, "a", prompt(9), prompt_logprobs=1))
    output = scheduler.schedule()
    messages = scheduler.update_from_output(
        output,
        result(("a", []), prompt_logprobs_dict={"a": "tensors"}, prompt_token_id_logprobs_dict={"a": "more"}),  # type: ignore[dict-item]
    )
    (sent,) = messages[0].outputs
    assert sent.new_prompt_logprobs_tensors == "tensors"
    assert sent.prompt_token_id_logprobs == "more"
    assert sent.new_token_ids == []
    assert not sent.finished


def test_a_pooling_request_ends_with_its_first_output() -> None:
    scheduler = make_scheduler()
    request = Request("p", prompt(9), None, PoolingParams(), arrival_time=0.0)
    scheduler.add_request(request)
    output = scheduler.schedule()
    messages = scheduler.update_from_output(output, result(("p", []), pooler_output=["vector"]))
    (sent,) = messages[0].outputs
    assert sent.pooling_output == "vector"
    assert sent.finish_reason is FinishReason.STOP
    assert not scheduler.has_request("p")


def test_trace_headers_come_back() -> None:
    scheduler = make_scheduler()
    request = make_request(scheduler, "a", prompt(5))
    request.trace_headers, request.plain_output = {"x": "y"}, False
    scheduler.add_request(request)
    output = scheduler.schedule()
    assert scheduler.update_from_output(output, result(("a", [1])))[0].outputs[0].trace_headers == {"x": "y"}


def test_results_of_a_step_made_elsewhere_are_applied() -> None:
    scheduler = make_scheduler()
    request = make_request(scheduler, "a", prompt(5), 3)
    scheduler.requests["a"] = request
    scheduler.running.append(request)
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = 5
    output = scheduler.schedule()
    copied = type(output)(**vars(output))
    copied.num_scheduled_tokens = {"a": 1}
    scheduler.update_from_output(copied, result(("a", [4])))
    assert request.output_token_ids == [4]
    assert request.num_in_flight_tokens == 0


def test_the_v1_form_resumes_with_a_replaced_table_and_all_tokens() -> None:
    scheduler = make_scheduler([full(4)], 40)
    scheduler.use_v2_model_runner = False
    for name, seed in (("a", 0), ("b", 1)):
        scheduler.add_request(make_request(scheduler, name, prompt(9, seed), 9))
    output = scheduler.schedule()
    scheduler.update_from_output(output, result(("a", [1]), ("b", [2])))
    scheduler._preempt_request(scheduler.requests["b"], 0.0)
    output = scheduler.schedule()
    cached = output.scheduled_cached_reqs
    assert output.scheduled_new_reqs == []
    assert cached.req_ids == ["a", "b"]
    assert cached.resumed_req_ids == {"b"}
    assert len(cached.new_block_ids[1][0]) == 3  # type: ignore[index]
    assert cached.all_token_ids == {}
    scheduler.update_from_output(output, result(("a", [1]), ("b", [3])))
    scheduler.running.reverse()
    scheduler.max_num_scheduled_tokens = 1
    assert scheduler.schedule().scheduled_cached_reqs.req_ids == ["b"]
    scheduler.max_num_scheduled_tokens = 8
    late = scheduler.schedule().scheduled_cached_reqs
    assert late.all_token_ids == {"a": prompt(9) + [1, 1]}


def test_pipeline_stages_learn_tokens_from_the_scheduler_without_look_ahead() -> None:
    config = sched_config()
    config.parallel_config.pipeline_parallel_size = 2
    scheduler = Scheduler(config, kv_config([full()], 40), make_scheduler().structured_output_manager, 4, 4)  # type: ignore[arg-type]
    scheduler.add_request(make_request(scheduler, "a", prompt(5)))
    scheduler.update_from_output(scheduler.schedule(), result(("a", [9])))
    assert scheduler.schedule().scheduled_cached_reqs.new_token_ids == [[9]]


def test_pipeline_stages_with_look_ahead_wait_for_the_last_stage() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    config = sched_config(looks_ahead=True)
    config.parallel_config.pipeline_parallel_size = 2
    scheduler = AsyncScheduler(
        config,  # type: ignore[arg-type]
        kv_config([full()], 40),
        make_scheduler().structured_output_manager,
        4,
        4,
    )
    scheduler.add_request(make_request(scheduler, "a", prompt(5)))
    sizes = [scheduler.schedule().num_scheduled_tokens.get("a", 0) for _ in range(4)]
    assert sizes == [5, 0, 1, 0]


def test_blocks_to_zero_are_named_only_where_stale_bytes_could_matter() -> None:
    plain = make_scheduler()
    plain.add_request(make_request(plain, "a", prompt(9)))
    assert plain.schedule().new_block_ids_to_zero is None
    hybrid = make_scheduler([full(8), mamba(8)])
    hybrid.add_request(make_request(hybrid, "a", prompt(9)))
    assert hybrid.schedule().new_block_ids_to_zero


def test_draft_statistics_per_step_and_request() -> None:
    config = sched_config(num_speculative_tokens=2)
    config.observability_config.per_request_spec_decode_metrics = "basic"
    scheduler = Scheduler(
        config,  # type: ignore[arg-type]
        kv_config([full()], 40),
        make_scheduler().structured_output_manager,
        4,
        4,
        log_stats=True,
    )
    scheduler.add_request(make_request(scheduler, "a", prompt(5), 4))
    scheduler.update_from_output(scheduler.schedule(), result(("a", [1])))
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[2, 3]]))
    messages = scheduler.update_from_output(scheduler.schedule(), result(("a", [2, 9])))
    stats = messages[0].scheduler_stats.spec_decoding_stats  # type: ignore[union-attr]
    assert stats is not None
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 1)
    messages = scheduler.update_from_output(scheduler.schedule(), result(("a", [5])))
    final = messages[0].outputs[0].spec_decode_metrics
    assert final is not None
    assert final.num_accepted_tokens_per_pos == [1, 0]


def test_a_prefill_chunk_drops_drafts() -> None:
    scheduler = make_scheduler(num_speculative_tokens=2, max_num_batched_tokens=8)
    scheduler.add_request(make_request(scheduler, "a", prompt(20)))
    scheduler.schedule()
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[2, 3]]))
    assert scheduler.requests["a"].spec_token_ids == []


def test_adapters_are_counted_by_state() -> None:
    scheduler = make_scheduler(lora_config=SimpleNamespace(max_loras=2), log_stats=True, max_num_seqs=1)
    for i in range(2):
        adapter = LoRARequest("tuned", 1, "/nowhere")
        scheduler.add_request(make_request(scheduler, f"r{i}", prompt(5, i), lora_request=adapter))
    scheduler.schedule()
    stats = scheduler.make_stats()
    assert stats is not None
    assert (stats.running_lora_adapters, stats.waiting_lora_adapters) == ({"tuned": 1}, {"tuned": 1})


def test_connector_statistics_of_both_halves_are_combined() -> None:
    connector = FakeConnector(4)
    connector.get_kv_connector_stats = lambda: KVConnectorStats({"loads": 2})  # type: ignore[method-assign]
    transfer = SimpleNamespace(kv_connector=None, is_kv_consumer=True, kv_load_failure_policy="fail")
    scheduler = make_scheduler(connector=connector, kv_transfer_config=transfer, log_stats=True)
    scheduler.add_request(make_request(scheduler, "a", prompt(5)))
    report = KVConnectorOutput(kv_connector_stats=KVConnectorStats({"loads": 1, "stores": 5}))
    messages = scheduler.update_from_output(
        scheduler.schedule(), result(("a", [1]), kv_connector_output=report, cudagraph_stats="graph")
    )
    stats = messages[0].scheduler_stats
    assert stats is not None
    assert stats.kv_connector_stats == {"loads": 3, "stores": 5}
    assert stats.cudagraph_stats == "graph"
    assert scheduler.get_kv_connector() is connector


def test_a_producer_registers_partial_tails_and_a_plain_connector_gets_one_list() -> None:
    calls: list[Any] = []
    connector = SimpleNamespace(
        register_finished_partial_tail=lambda request, ids, tails: calls.append(tails),
        request_finished=lambda request, ids: (calls.append(ids), (True, None))[1],
    )
    tails = [(0, 3, 6)]
    manager = SimpleNamespace(
        remove_skipped_blocks=lambda *args: calls.append(args),
        get_block_ids_for_computed_tokens=lambda request_id, n: ([1, 2],),
        finalize_partial_tail_offloads=lambda request: tails,
    )
    scheduler = make_scheduler()
    request = make_request(scheduler, "a", prompt(9))
    request.num_computed_tokens, request.num_in_flight_tokens = 8, 1
    assert request_finished(connector, manager, request, is_producer=True) == (True, None)  # type: ignore[arg-type]
    assert calls == [("a", 7, 9), tails, [1, 2]]


def test_an_aborted_on_arrival_request_reaches_the_connector_only() -> None:
    connector = FakeConnector(4)
    scheduler = make_scheduler(connector=connector)
    request = make_request(scheduler, "a", prompt(9))
    request.abort_immediately = True
    scheduler.add_request(request)
    assert connector.finished["a"][0] is RequestStatus.FINISHED_ABORTED
    assert not scheduler.has_request("a")


def test_the_event_publisher_tells_its_configuration() -> None:
    scheduler = make_scheduler()
    assert scheduler.get_kv_event_publisher_config() is None
    assert scheduler.get_ec_connector() is None  # type: ignore[func-returns-value]
    scheduler.reset_encoder_cache()
    assert scheduler.get_kv_cache_usage() == 0.0
    assert KVEventsConfig().publisher in (None, "null")


def test_a_model_without_a_length_is_refused() -> None:
    config = sched_config()
    config.model_config = None
    with pytest.raises(ValueError, match="max_model_len"):
        Scheduler(config, kv_config([full()], 8), make_scheduler().structured_output_manager, 4)  # type: ignore[arg-type]


def test_cache_shape_of_models() -> None:
    plain = CacheShape.from_config(kv_config([full()], 8), 4, 4)
    assert (plain.restart_alignment, plain.state_block_tokens, plain.can_cut_anywhere) == (1, None, True)
    hybrid = CacheShape.from_config(kv_config([full(4), mamba(8)], 8), 8, 4)
    assert (hybrid.restart_alignment, hybrid.state_block_tokens, hybrid.can_cut_anywhere) == (8, 8, False)
    assert hybrid.restart_position(15) == 8
    config = kv_config([full(4), mamba(8)], 8)
    config.cache_hit_alignment_tokens = 4
    assert CacheShape.from_config(config, 8, 4).restart_alignment == 4


def test_data_parallel_engines_leave_the_cadence_to_the_core() -> None:
    config = sched_config(prefill_schedule_interval=4)
    assert params_from_config(config, kv_config([full()], 8), 4, 4).local_prefill_interval == 4  # type: ignore[arg-type]
    config.parallel_config.data_parallel_size = 2
    assert params_from_config(config, kv_config([full()], 8), 4, 4).local_prefill_interval == 1  # type: ignore[arg-type]


def test_outside_schedulers_inherit_harmless_defaults() -> None:
    class Minimal(SchedulerInterface):
        """Ends what it is told to end."""

    Minimal.__abstractmethods__ = frozenset()
    scheduler = Minimal()  # type: ignore[abstract]
    scheduler.finish_requests = lambda ids, status: [make_request(make_scheduler(), "a", [1])]  # type: ignore[method-assign]
    scheduler.get_num_unfinished_requests = lambda: 0  # type: ignore[method-assign]
    scheduler.has_finished_requests = lambda: True  # type: ignore[method-assign]
    output = make_scheduler().schedule()
    failed = scheduler.fail_step(output, RequestError("x", "y"))
    assert failed[0].outputs[0].finish_reason is FinishReason.ERROR
    assert scheduler.has_requests()
    assert not scheduler.has_unfinished_requests()
    scheduler.flush_events()
    assert scheduler.reset_prefix_cache_report is None
    assert scheduler.get_kv_connector() is None
    assert scheduler.get_kv_event_publisher_config() is None


def test_a_connector_and_a_load_beside_a_prefill_leave_room_for_it() -> None:
    connector = FakeConnector(4)
    scheduler = make_scheduler([full(4)], 21, connector=connector, max_num_batched_tokens=16)
    driver = Driver(scheduler)
    LoadRunner(driver.worker, connector)
    driver.add("long", prompt(50), max_tokens=1)
    driver.step()
    assert scheduler._inflight_prefills == {scheduler.requests["long"]}
    connector.remember(prompt(28, 4))
    driver.add("load", prompt(30, 4), max_tokens=1)
    driver.step()
    assert not scheduler.kv_holding_waiting, "its blocks are spoken for by the running prefill"
    driver.run()
    assert set(driver.ends) == {"long", "load"}
