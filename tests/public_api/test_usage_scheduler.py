"""The scheduler as outside code drives it: configs by hand, steps by hand, results by hand."""

from __future__ import annotations

import pytest

from tests.public_api.by_hand import (
    BLOCK,
    EOS,
    full,
    kv_config,
    request,
    runner_output,
    scheduler,
    vllm_config,
    window,
)
from vllm.config import CacheConfig, KVEventsConfig, SchedulerConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.utils import check_stop, remove_all
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

READ = (
    "running waiting kv_holding_waiting deferred_waiting requests finished_req_ids finished_req_ids_dict "
    "finished_recving_kv_req_ids failed_recving_kv_req_ids kv_cache_manager connector encoder_cache_manager "
    "structured_output_manager scheduler_config cache_config vllm_config kv_cache_config block_size hash_block_size "
    "max_num_running_reqs max_model_len max_num_scheduled_tokens connector_prefix_cache_stats log_stats policy "
    "defer_block_free deferred_frees deferred_loads sched_step_seq processed_step_seq current_step num_executed_steps "
    "last_prefill_step local_prefill_interval num_waiting_for_streaming_input kv_event_publisher requires_kv_delivery "
    "recompute_kv_load_failures"
)


def test_attributes_are_there() -> None:
    sched = scheduler()
    assert [name for name in READ.split(" ") if not hasattr(sched, name)] == []
    assert sched.running == []
    assert isinstance(sched.running, list)
    assert sched.requests == {}
    assert (sched.block_size, sched.hash_block_size, sched.max_num_running_reqs) == (BLOCK, BLOCK, 16)
    assert sched.policy == SchedulingPolicy.FCFS
    assert (sched.max_model_len, sched.max_num_scheduled_tokens) == (8192, 8192)
    assert sched.connector is None
    assert sched.get_kv_connector() is None
    assert sched.get_ec_connector() is None


def test_attributes_can_be_assigned() -> None:
    sched = scheduler()
    sched.max_model_len = 40
    sched.max_num_scheduled_tokens = 24
    sched.use_v2_model_runner = True
    sched.defer_block_free = False
    sched.processed_step_seq = 0
    sched.connector = None
    sched.kv_cache_manager = KVCacheManager(kv_config(), 8192, BLOCK, BLOCK)
    sched.add_request(request("a", list(range(30))))
    assert sched.schedule().num_scheduled_tokens == {"a": 24}


def test_requests_are_added_and_finished() -> None:
    sched = scheduler()
    for index in range(5):
        sched.add_request(request(f"{index}", [index] * 10))
    assert sched.get_num_unfinished_requests() == 5
    assert sched.has_request("3")
    assert not sched.has_request("9")
    assert sched.get_request_counts() == (0, 5)
    ended = sched.finish_requests("3", RequestStatus.FINISHED_ABORTED)
    assert [r.request_id for r in ended] == ["3"]
    assert sched.finish_requests("3", RequestStatus.FINISHED_ABORTED) == []
    sched.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert sched.get_num_unfinished_requests() == 0
    assert sched.finished_req_ids == {str(index) for index in range(5)}
    assert sched.schedule().finished_req_ids == {str(index) for index in range(5)}


def test_an_idle_scheduler_gives_an_empty_step() -> None:
    sched = scheduler()
    output = sched.schedule()
    assert output.total_num_scheduled_tokens == 0
    assert not sched.has_requests()
    sched.update_from_output(output, runner_output(output))
    assert SchedulerOutput.make_empty().num_scheduled_tokens == {}


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_step_and_its_results(prefix_caching: bool) -> None:
    config = vllm_config(cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_caching))
    sched = scheduler(config)
    sched.add_request(request("a", list(range(20)), max_tokens=3))
    sched.add_request(request("b", list(range(100, 140)), max_tokens=3))
    output = sched.schedule()
    assert output.num_scheduled_tokens == {"a": 20, "b": 40}
    assert output.total_num_scheduled_tokens == 60
    assert [new.req_id for new in output.scheduled_new_reqs] == ["a", "b"]
    assert [len(new.block_ids[0]) for new in output.scheduled_new_reqs] == [2, 3]
    assert output.scheduled_cached_reqs.num_reqs == 0
    assert [r.request_id for r in sched.running] == ["a", "b"]
    messages = sched.update_from_output(output, runner_output(output, a=[1], b=[2]))
    assert set(messages) == {0}
    assert isinstance(messages[0], EngineCoreOutputs)
    assert [(o.request_id, o.new_token_ids) for o in messages[0].outputs] == [("a", [1]), ("b", [2])]
    assert list(sched.requests["a"].output_token_ids) == [1]
    second = sched.schedule()
    assert second.scheduled_new_reqs == []
    assert second.scheduled_cached_reqs.req_ids == ["a", "b"]
    assert second.scheduled_cached_reqs.num_computed_tokens == [20, 40]
    assert second.num_scheduled_tokens == {"a": 1, "b": 1}
    messages = sched.update_from_output(second, runner_output(second, a=[EOS], b=[3]))
    ended = {o.request_id: o.finish_reason for o in messages[0].outputs}
    assert ended == {"a": FinishReason.STOP, "b": None}
    third = sched.schedule()
    assert third.finished_req_ids == {"a"}
    messages = sched.update_from_output(third, runner_output(third, b=[4]))
    assert messages[0].outputs[0].finish_reason is FinishReason.LENGTH
    assert not sched.has_unfinished_requests()
    assert sched.has_finished_requests()
    assert sched.kv_cache_manager.block_pool.get_num_free_blocks() == 9999


def test_budget_example_of_the_description() -> None:
    limits = SchedulerConfig.default_factory(
        max_num_batched_tokens=512, max_num_seqs=16, max_model_len=8192, async_scheduling=False
    )
    sched = scheduler(vllm_config(scheduler_config=limits))
    for name in ("x", "y", "z"):
        sched.add_request(request(name, [ord(name)] * 5))
    output = sched.schedule()
    sched.update_from_output(output, runner_output(output))
    sched.add_request(request("three", [3] * 300))
    sched.add_request(request("four", [4] * 400))
    output = sched.schedule()
    assert output.num_scheduled_tokens == {"x": 1, "y": 1, "z": 1, "three": 300, "four": 209}
    sched.update_from_output(output, runner_output(output, four=[]))
    assert sched.schedule().num_scheduled_tokens["four"] == 191


def test_a_step_made_by_hand_is_applied() -> None:
    """Outside code places requests itself and hands in a step that was never scheduled."""
    sched = scheduler()
    requests = [request("a", [1] * 10, max_tokens=10), request("b", [2] * 10, max_tokens=10)]
    for made in requests:
        made.num_computed_tokens = made.num_tokens
        sched.requests[made.request_id] = made
        sched.running.append(made)
        made.status = RequestStatus.RUNNING
    output = SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        num_scheduled_tokens={"a": 1, "b": 1},
        total_num_scheduled_tokens=2,
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
    )
    sched.update_from_output(output, runner_output(output, a=[EOS], b=[10]))
    assert sched.running == [requests[1]]
    assert requests[0].status == RequestStatus.FINISHED_STOPPED
    assert "a" in sched.finished_req_ids
    assert list(requests[1].output_token_ids) == [10]


def test_drafts_of_a_step_made_by_hand_end_at_the_stop() -> None:
    sched = scheduler()
    made = request("a", [1] * 10, max_tokens=10, stop_token_ids=[42])
    made.num_computed_tokens = made.num_tokens + 2
    sched.requests["a"] = made
    sched.running.append(made)
    made.status = RequestStatus.RUNNING
    output = SchedulerOutput([], CachedRequestData.make_empty(), {"a": 3}, 3, {"a": [10, 42]}, {}, set(), [])
    sched.update_from_output(output, runner_output(output, a=[10, 42, 12]))
    assert made.status == RequestStatus.FINISHED_STOPPED
    assert made.stop_reason == 42
    assert list(made.output_token_ids) == [10, 42]


def test_prefix_hits_between_requests() -> None:
    sched = scheduler(kv=kv_config(num_blocks=100))
    prompt = list(range(40))
    cached = []
    for name in ("first", "second"):
        sched.add_request(request(name, prompt, max_tokens=1))
        output = sched.schedule()
        cached.append(output.scheduled_new_reqs[0].num_computed_tokens)
        messages = sched.update_from_output(output, runner_output(output))
        stats = messages[0].outputs[0].prefill_stats
        assert stats is not None
        assert stats.num_cached_tokens == cached[-1]
    assert cached == [0, 32]
    assert sched.reset_prefix_cache() is True
    sched.add_request(request("third", prompt))
    assert sched.schedule().scheduled_new_reqs[0].num_computed_tokens == 0
    assert sched.reset_prefix_cache() is False
    assert sched.reset_connector_cache() is True
    assert sched.reset_prefix_cache(reset_running_requests=True) is True
    assert sched.running == []
    assert sched.requests["third"].status == RequestStatus.PREEMPTED


def test_preemption_puts_the_last_one_first_in_line() -> None:
    sched = scheduler(kv=kv_config(num_blocks=5))
    sched.add_request(request("a", [1] * 32, max_tokens=40))
    sched.add_request(request("b", [2] * 32, max_tokens=40))
    output = sched.schedule()
    assert output.num_scheduled_tokens == {"a": 32, "b": 32}
    sched.update_from_output(output, runner_output(output))
    output = sched.schedule()
    assert output.num_scheduled_tokens == {"a": 1}
    assert output.preempted_req_ids == {"b"}
    assert sched.requests["b"].num_preemptions == 1
    assert sched.waiting.peek_request() is sched.requests["b"]
    assert sched.requests["b"].num_computed_tokens == 0


def test_pause_states() -> None:
    sched = scheduler()
    sched.add_request(request("a", [1] * 4))
    sched.set_pause_state(PauseState.PAUSED_NEW)
    assert sched.schedule().total_num_scheduled_tokens == 0
    assert sched.pause_state == PauseState.PAUSED_NEW
    sched.set_pause_state(PauseState.UNPAUSED)
    assert sched.schedule().num_scheduled_tokens == {"a": 4}


def test_several_groups() -> None:
    config = vllm_config()
    kv = kv_config(full(), window(32), num_blocks=200)
    sched = scheduler(config, kv)
    sched.add_request(request("a", list(range(70)), max_tokens=1))
    output = sched.schedule()
    assert len(output.scheduled_new_reqs[0].block_ids) == 2
    sched.update_from_output(output, runner_output(output))
    sched.add_request(request("b", list(range(70)), max_tokens=1))
    assert sched.schedule().scheduled_new_reqs[0].num_computed_tokens == 64


def test_statistics_and_events_are_offered() -> None:
    config = vllm_config(kv_events_config=KVEventsConfig())
    sched = scheduler(config)
    stats = sched.make_stats()
    assert stats is not None
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (0, 0)
    assert sched.get_kv_cache_usage() == 0.0
    assert sched.kv_event_publisher is not None
    sched.shutdown()


def test_queues() -> None:
    for policy, order in (
        (SchedulingPolicy.FCFS, ["b", "a", "c"]),
        (SchedulingPolicy.PRIORITY, ["a", "b", "c"]),
    ):
        queue = create_request_queue(policy)
        made = {name: request(name, [1]) for name in "abc"}
        for name, priority in (("b", 1), ("a", 0), ("c", 2)):
            made[name].priority = priority
            queue.add_request(made[name])
        assert [r.request_id for r in queue] == order
        assert len(queue) == 3
        assert bool(queue)
        assert queue.peek_request().request_id == order[0]
        queue.remove_requests([made["c"]])
        assert queue.pop_request().request_id == order[0]
        queue.prepend_request(made["c"])
        assert len(queue) == 2


def test_step_data_of_a_request() -> None:
    made = request("a", list(range(5)))
    new = NewRequestData.from_request(made, ([1],))
    assert (new.req_id, new.prompt_len, new.block_ids, new.replay_start) == ("a", 5, ([1],), 0)
    assert "[0, 1, 2, 3, 4]" not in new.anon_repr()
    cached = CachedRequestData(["a"], set(), [], {}, [None], [5], [0])
    assert cached.num_reqs == 1
    assert cached.is_context_phase("a")


def test_stop_checks() -> None:
    made = request("a", [1] * 4, max_tokens=2)
    made.append_output_token_ids(5)
    assert not check_stop(made, 100)
    made.append_output_token_ids([6])
    assert check_stop(made, 100)
    assert made.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert remove_all([1, 2, 3], {2}) == [1, 3]


def test_request_reads_and_writes() -> None:
    made = request("a", list(range(16)))
    reads = (
        "prompt_token_ids num_prompt_tokens all_token_ids output_token_ids num_tokens num_tokens_with_spec "
        "num_output_tokens block_hashes stop_reason num_preemptions is_prefill_chunk replay_start "
        "num_stale_output_tokens drop_stale_output next_decode_eligible_step last_sched_seq session_id arrival_time "
        "has_encoder_inputs spec_decode_metrics status num_computed_tokens num_in_flight_tokens "
        "num_output_placeholders spec_token_ids priority shared_prefix_boundary skip_reading_prefix_cache lora_request "
        "structured_output_request kv_transfer_params max_tokens resumable ec_transfer_params kv_cache_report_mode"
    )
    assert [name for name in reads.split(" ") if not hasattr(made, name)] == []
    for name, value in {
        "status": RequestStatus.RUNNING, "num_computed_tokens": 3, "num_in_flight_tokens": 1, "priority": 4,
        "num_output_placeholders": 1, "spec_token_ids": [1], "shared_prefix_boundary": 8, "max_tokens": 3,
        "skip_reading_prefix_cache": True, "lora_request": None, "structured_output_request": None,
        "kv_transfer_params": {"a": 1}, "resumable": True,
    }.items():  # fmt: skip
        setattr(made, name, value)
        assert getattr(made, name) == value
    assert made.num_tokens_with_spec == 17
    assert len(made.block_hashes) == 1
    with pytest.raises((TypeError, AttributeError)):
        made.all_token_ids.append(3)  # type: ignore[attr-defined]
    with pytest.raises(ValueError):
        type(made)("b", [1], None, None)


def test_an_empty_runner_output_ends_nothing() -> None:
    sched = scheduler()
    sched.add_request(request("a", [1] * 4))
    output = sched.schedule()
    sched.update_from_output(output, ModelRunnerOutput(["a"], {"a": 0}, [[]]))
    assert sched.has_unfinished_requests()
