"""The asyncio engine over a real core process: streams, aborts, pauses, resets, death."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.helpers.engine_configs import async_engine_args
from tests.helpers.faulty_executors import DEADLY, POISON
from vllm.exceptions import GenerationError, QueueOverflowError, VLLMNotImplementedError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.intake import FOLLOW_SLICE
from vllm.v1.metrics.reader import get_metrics_snapshot

FLAKY = "tests.helpers.faulty_executors.PoisonedExecutor"
LONG = 200
pytestmark = pytest.mark.asyncio(loop_scope="module")


def start(**settings: Any) -> AsyncLLM:
    return AsyncLLM.from_engine_args(async_engine_args(**{"distributed_executor_backend": FLAKY, **settings}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[AsyncLLM]:
    engine = start()
    yield engine
    engine.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: AsyncLLM) -> AsyncIterator[AsyncLLM]:
    """The shared engine; afterwards nothing of the test may be left in front end or core."""
    yield shared
    await shared.resume_generation()
    assert not shared.output_processor.request_states
    assert not shared.output_processor.parent_requests
    assert not shared.output_processor.external_req_ids
    deadline = time.monotonic() + 5
    while not await shared.reset_prefix_cache():
        assert time.monotonic() < deadline, await shared.reset_prefix_cache_detailed()
        await asyncio.sleep(0.02)


def greedy(max_tokens: int = 6, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **params)


async def collect(
    engine: AsyncLLM, prompt: Any, params: SamplingParams, request_id: str = "r"
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, request_id)]


async def test_streams_join_to_the_whole(engine: AsyncLLM) -> None:
    whole = (await collect(engine, "hello", greedy(30, output_kind=RequestOutputKind.FINAL_ONLY)))[-1]
    deltas = await collect(engine, "hello", greedy(30, output_kind=RequestOutputKind.DELTA))
    cumulative = await collect(engine, "hello", greedy(30))
    assert "".join(output.outputs[0].text for output in deltas) == whole.outputs[0].text
    assert [i for output in deltas for i in output.outputs[0].token_ids] == list(whole.outputs[0].token_ids)
    assert cumulative[-1].outputs[0].text == whole.outputs[0].text
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
    assert len(deltas) > 1, "tokens are streamed, not delivered at the end"


async def test_many_requests_at_once(engine: AsyncLLM) -> None:
    async def one(index: int) -> tuple[str, list[int]]:
        outputs = await collect(engine, [5 + index % 7] * (3 + index % 40), greedy(8), f"r{index}")
        return outputs[-1].request_id, list(outputs[-1].outputs[0].token_ids)

    results = dict(await asyncio.gather(*[one(index) for index in range(64)]))
    assert len(results) == 64
    assert results["r0"] == list((await one(0))[1])


async def test_leaving_the_stream_aborts_the_request(engine: AsyncLLM) -> None:
    generator = engine.generate([5] * 20, greedy(LONG, output_kind=RequestOutputKind.DELTA), "r")
    seen = 0
    async for _ in generator:
        seen += 1
        if seen == 3:
            break
    await generator.aclose()
    assert not engine.output_processor.has_unfinished_requests()


async def test_cancelling_the_task_aborts_the_request(engine: AsyncLLM) -> None:
    task = asyncio.ensure_future(collect(engine, [5] * 20, greedy(LONG)))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engine.output_processor.has_unfinished_requests()


async def test_sch_13_disconnecting_from_n_4_again_and_again(engine: AsyncLLM) -> None:
    params = SamplingParams(n=4, max_tokens=LONG, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    for index in range(50):
        generator = engine.generate([5] * 10, params, f"r{index}")
        seen = 0
        async for _ in generator:
            seen += 1
            if seen == 3:
                break
        await generator.aclose()
        report = await engine.reset_prefix_cache_detailed()  # reaches the core behind the abort
        assert report["requests_running"] == 0, "no sample runs on"
    assert not engine.output_processor.parent_requests


async def test_abort_by_id_gives_a_last_output(engine: AsyncLLM) -> None:
    outputs: list[RequestOutput] = []
    async for output in engine.generate([5] * 20, greedy(LONG), "mine"):
        outputs.append(output)
        if len(outputs) == 2:
            await engine.abort("mine")
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert outputs[-1].outputs[0].token_ids


@pytest.mark.parametrize("wrong", [None, 5, ["a", None]])
async def test_abort_of_what_is_no_id_is_refused(engine: AsyncLLM, wrong: Any) -> None:
    with pytest.raises(
        VLLMValidationError, match="request_id must be a text or a list of texts, got (None|5)"
    ):
        await engine.abort(wrong)
    await engine.abort(["nobody"])


def many(n: int) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)


async def test_others_have_their_turn_while_many_samples_are_followed(engine: AsyncLLM) -> None:
    task = asyncio.ensure_future(collect(engine, [5] * 4, many(FOLLOW_SLICE * 5), "many"))
    seen = []
    while len(engine.output_processor.request_states) < FOLLOW_SLICE * 5:
        await asyncio.sleep(0)
        seen.append(len(engine.output_processor.request_states))
    assert len(set(seen)) >= 4  # the first two slices come together
    (output,) = await task
    assert [sample.index for sample in output.outputs] == list(range(FOLLOW_SLICE * 5))
    assert all(sample.finish_reason == "length" for sample in output.outputs)


@pytest.mark.parametrize("followed", [1, 5])
async def test_samples_aborted_while_they_are_followed_or_sent_never_run(
    engine: AsyncLLM, followed: int
) -> None:
    task = asyncio.ensure_future(collect(engine, [5] * 4, many(FOLLOW_SLICE * 5), "many"))
    while len(engine.output_processor.request_states) < FOLLOW_SLICE * followed:
        await asyncio.sleep(0)
    await engine.abort("many")
    (output,) = await asyncio.wait_for(task, 10)
    assert output.finished
    assert {sample.finish_reason for sample in output.outputs} == {"abort"}


async def test_cancelling_while_samples_are_followed_leaves_nothing(engine: AsyncLLM) -> None:
    task = asyncio.ensure_future(collect(engine, [5] * 4, many(FOLLOW_SLICE * 5), "many"))
    while not engine.output_processor.request_states:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engine.output_processor.request_states


async def test_sch_09_equal_ids_do_not_meet(engine: AsyncLLM) -> None:
    both = await asyncio.gather(*[collect(engine, [5, 6], greedy(10), "test-0") for _ in range(2)])
    assert [list(outputs[-1].outputs[0].token_ids) for outputs in both] == [
        list(both[0][-1].outputs[0].token_ids)
    ] * 2
    await collect(engine, [5], greedy(2), "test-0")


async def test_sch_09_equal_ids_are_refused_without_randomisation(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    first = asyncio.ensure_future(collect(engine, [5] * 9, greedy(30), "test-0"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(VLLMValidationError, match="'test-0' is in use"):
        await collect(engine, [5], greedy(), "test-0")
    assert len((await first)[-1].outputs[0].token_ids) == 30
    await collect(engine, [5], greedy(2), "test-0")


async def test_bad_requests_disturb_nobody(engine: AsyncLLM) -> None:
    running = asyncio.ensure_future(collect(engine, [5] * 9, greedy(60), "good"))
    bad: list[tuple[Any, SamplingParams]] = [
        ([999], greedy()),
        ([], greedy()),
        ("x" * 4000, greedy()),
        ("x", greedy(logit_bias={264: 1.0})),
        ("x", greedy(structured_outputs=StructuredOutputsParams(regex="["))),
        ("x", greedy(extra_args={"kv_transfer_params": "x"})),
        ("x", SamplingParams(max_tokens=None, min_tokens=10**5)),
    ]
    for prompt, params in bad:
        with pytest.raises(VLLMValidationError):
            await collect(engine, prompt, params, "bad")
    with pytest.raises(VLLMNotImplementedError):
        [output async for output in engine.encode("x", PoolingParams(task="embed"), "pool")]
    assert len((await running)[-1].outputs[0].token_ids) == 60


async def test_odd_requests_are_served_and_disturb_nobody(engine: AsyncLLM) -> None:
    remote = {"do_remote_prefill": True, "remote_prefill_cached_tokens": "many"}
    odd = [
        SamplingParams(n=2, seed=2**63 - 1, max_tokens=3, ignore_eos=True),
        greedy(3, extra_args={"kv_transfer_params": remote}),
    ]
    for params in odd:
        assert (await collect(engine, "x", params))[-1].finished
    await engine.check_health()


async def test_a_failed_step_is_an_error_of_its_requests(engine: AsyncLLM) -> None:
    with pytest.raises(GenerationError, match="a poisoned token"):
        await collect(engine, [5, *POISON], greedy(), "bad")
    with pytest.raises(GenerationError, match="a poisoned token"):
        await collect(engine, [5, *POISON], SamplingParams(n=3, max_tokens=5), "bad")
    assert (await collect(engine, [5, 6], greedy(), "good"))[-1].finished
    await engine.check_health()


async def test_structured_output(engine: AsyncLLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    constraint = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    outputs = await collect(engine, "x", SamplingParams(max_tokens=40, structured_outputs=constraint, seed=3))
    assert outputs[-1].outputs[0].text.startswith('{"a":')


# -- control ---------------------------------------------------------------------------------------------------------


async def test_pause_keep_freezes_and_resume_goes_on(engine: AsyncLLM) -> None:
    expected = (await collect(engine, [7] * 9, greedy(60)))[-1].outputs[0].token_ids
    task = asyncio.ensure_future(collect(engine, [7] * 9, greedy(60)))
    await asyncio.sleep(0.02)
    await engine.pause_generation("keep", clear_cache=False)
    assert await engine.is_paused()
    late = asyncio.ensure_future(collect(engine, [8], greedy(3), "late"))
    await asyncio.sleep(0.2)
    assert not late.done()
    await engine.resume_generation()
    assert (await task)[-1].outputs[0].token_ids == expected
    assert (await late)[-1].finished


async def test_pause_wait_serves_what_came_before(engine: AsyncLLM) -> None:
    before = asyncio.ensure_future(collect(engine, [7] * 9, greedy(80), "before"))
    await asyncio.sleep(0.02)
    pause = asyncio.ensure_future(engine.pause_generation("wait"))
    await asyncio.sleep(0.01)
    after = asyncio.ensure_future(collect(engine, [8], greedy(3), "after"))
    await pause
    assert (await asyncio.wait_for(before, 1))[-1].outputs[0].finish_reason == "length"
    assert not after.done()
    await engine.resume_generation()
    assert (await after)[-1].finished


async def test_pause_abort_ends_everything(engine: AsyncLLM) -> None:
    tasks = [asyncio.ensure_future(collect(engine, [7] * 9, greedy(LONG), f"r{i}")) for i in range(12)]
    await asyncio.sleep(0.05)
    await engine.pause_generation("abort")
    for outputs in await asyncio.gather(*tasks):
        assert outputs[-1].outputs[0].finish_reason == "abort"


async def test_reset_says_why_it_did_not_succeed(engine: AsyncLLM) -> None:
    task = asyncio.ensure_future(collect(engine, [7] * 40, greedy(LONG)))
    await asyncio.sleep(0.05)
    result = await engine.reset_prefix_cache_detailed()
    assert result["success"] is False
    assert result["reason"]
    forced = await engine.reset_prefix_cache(reset_running_requests=True)
    assert forced
    assert len((await task)[-1].outputs[0].token_ids) == LONG


def sleep_state() -> str:
    """The state that the metrics show."""
    states = [metric for metric in get_metrics_snapshot() if metric.name == "vllm:engine_sleep_state"]
    return next(str(metric.labels["sleep_state"]) for metric in states if metric.value)


async def test_sleep_and_wake_up(engine: AsyncLLM) -> None:
    expected = (await collect(engine, [7] * 9, greedy()))[-1].outputs[0].token_ids
    assert sleep_state() == "awake"
    await engine.sleep(1)
    assert await engine.is_sleeping()
    assert sleep_state() == "weights_offloaded"
    await engine.wake_up(["weights"])
    assert sleep_state() == "weights_offloaded"
    await engine.wake_up()
    assert sleep_state() == "awake"
    await engine.pause_generation()
    await engine.release_kv_cache_memory()
    assert sleep_state() == "weights_offloaded"
    await engine.resume_generation()
    assert sleep_state() == "awake"
    assert not await engine.is_sleeping()
    assert (await collect(engine, [7] * 9, greedy()))[-1].outputs[0].token_ids == expected
    with pytest.raises(RuntimeError, match="level=7"):
        await engine.sleep(7)


async def test_facts_about_the_engine(engine: AsyncLLM) -> None:
    assert engine.is_running
    assert not engine.errored
    assert await engine.get_supported_tasks() == ("generate",)
    assert await engine.get_kv_event_sources() == {}
    (group,) = await engine.get_kv_cache_group_metadata()
    assert group == {"group_idx": 0, "kind": "full_attention", "block_size": 16, "sliding_window": None}
    assert (await engine.get_tokenizer()).eos_token_id == 2
    assert engine.vllm_config.cache_config.num_gpu_blocks
    assert await engine.collective_rpc("check_health") == [None]


# -- the end ---------------------------------------------------------------------------------------------------------


async def test_waiting_requests_are_bounded() -> None:
    engine = start(max_num_queued_reqs=2, max_num_seqs=1)
    tasks = [asyncio.ensure_future(collect(engine, [5] * 50, greedy(3), f"r{i}")) for i in range(6)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [result for result in results if isinstance(result, QueueOverflowError)]
    assert len(refused) == 4
    assert engine.intake.admission.rejections["max_num_queued_reqs"] == 4
    engine.shutdown()


async def test_death_of_the_core_reaches_every_reader() -> None:
    engine = start()
    running = [asyncio.ensure_future(collect(engine, [5] * 9, greedy(LONG), f"r{i}")) for i in range(4)]
    await asyncio.sleep(0.1)
    running.append(asyncio.ensure_future(collect(engine, [5, *DEADLY], greedy(), "deadly")))
    results = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 10)
    assert all(isinstance(result, EngineDeadError) for result in results), results
    assert engine.errored
    assert not engine.is_running
    for call in (engine.check_health(), collect(engine, [5], greedy()), engine.reset_prefix_cache()):
        with pytest.raises(EngineDeadError):
            await call
    engine.shutdown()


async def test_control_calls_after_the_end_say_so() -> None:
    engine = start()
    engine.shutdown()
    for call in (engine.reset_prefix_cache, engine.sleep, engine.resume_generation):
        with pytest.raises(EngineDeadError, match="was shut down"):
            await call()


async def test_shutdown_with_readers() -> None:
    engine = start()
    task = asyncio.ensure_future(collect(engine, [5] * 9, greedy(LONG)))
    await asyncio.sleep(0.1)
    engine.shutdown()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(task, 5)
    with pytest.raises(EngineDeadError):
        await engine.check_health()
    assert not engine.errored, "a wanted end is no error"
