"""A tiny model, the core in this process: text, caches, tiers, n > 1, failures of single requests."""

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.helpers.engine_configs import engine_args, offload_settings, prompt_of
from tests.helpers.faulty_executors import POISON
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.structured_output.guidance import GuidanceBackend, GuidanceGrammar

FLAKY = "tests.helpers.faulty_executors.PoisonedExecutor"
engines: list[LLMEngine] = []


@pytest.fixture(autouse=True)
def close_engines() -> Iterator[None]:
    yield
    while engines:
        engines.pop().shutdown()


def start(name: str = "llama", **settings: Any) -> LLMEngine:
    engine = LLMEngine.from_engine_args(engine_args(name, **settings), enable_multiprocessing=False)
    engines.append(engine)
    return engine


def greedy(max_tokens: int = 8, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **params)


def run(
    engine: LLMEngine, prompts: dict[str, Any], params: SamplingParams | None = None
) -> dict[str, RequestOutput]:
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, params or greedy())
    done: dict[str, RequestOutput] = {}
    steps = 0
    while engine.has_unfinished_requests():
        steps += 1
        assert steps < 2000, "the engine makes no progress"
        for output in engine.step():
            if output.finished:
                assert isinstance(output, RequestOutput)
                done[output.request_id] = output
    return done


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_batched_requests_equal_single_ones(async_scheduling: bool) -> None:
    engine = start(async_scheduling=async_scheduling, enable_prefix_caching=False)
    prompts = {f"r{i}": prompt_of(5 + 40 * i, i) for i in range(4)}
    together = run(engine, prompts)
    alone = {name: run(engine, {name: prompt})[name] for name, prompt in prompts.items()}
    assert {n: tokens(o) for n, o in together.items()} == {n: tokens(o) for n, o in alone.items()}
    assert all(len(tokens(output)) == 8 for output in together.values())


@pytest.mark.parametrize("name", ["llama", "qwen3", "glm5_next"])
def test_prefix_cache_and_cpu_tier_give_the_same_tokens(name: str) -> None:
    engine = start(name, max_model_len=512, **offload_settings())
    block = engine.cache_config.cache_hit_alignment_tokens
    assert block is not None
    prompt = prompt_of(3 * block + 5)
    fresh = run(engine, {"a": prompt})["a"]
    again = run(engine, {"b": prompt})["b"]
    assert engine.reset_prefix_cache()
    from_host = run(engine, {"c": prompt})["c"]
    assert engine.reset_prefix_cache(reset_connector=True)
    cold = run(engine, {"d": prompt})["d"]
    assert [o.num_cached_tokens for o in (fresh, again, from_host, cold)] == [0, 3 * block, 3 * block, 0]
    assert tokens(fresh) == tokens(again) == tokens(from_host) == tokens(cold)


@pytest.mark.parametrize("name", ["llama", "glm5_next"])
def test_a_disk_tier_serves_what_the_cpu_tier_has_no_room_for(name: str, tmp_path: Path) -> None:
    settings = offload_settings()
    settings["kv_transfer_config"]["kv_connector_extra_config"] = {
        "num_cpu_blocks": 33,
        "disk_tier": True,
        "disk_path": str(tmp_path / "kv"),
        "disk_capacity_bytes": 64 << 20,
        "decline_slow_tier": "off",  # computing is quick with so small a model
    }
    engine = start(name, max_model_len=512, **settings)
    block = engine.cache_config.cache_hit_alignment_tokens
    assert block is not None
    prompts = [prompt_of(3 * block + 5, seed) for seed in range(16)]
    fresh = [run(engine, {f"a{i}": prompt})[f"a{i}"] for i, prompt in enumerate(prompts)]
    assert engine.reset_prefix_cache()
    again = [run(engine, {f"b{i}": prompt})[f"b{i}"] for i, prompt in enumerate(prompts)]
    assert [tokens(output) for output in again] == [tokens(output) for output in fresh]
    assert [output.num_cached_tokens for output in again] == [3 * block] * len(prompts)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_policies_of_the_tiers_change_no_answer() -> None:
    """ARC, storing on the second offer, and the measure of what is worth reading, with times of a real engine."""
    settings = offload_settings()
    settings["kv_transfer_config"]["kv_connector_extra_config"] |= {
        "eviction_policy": "arc",
        "store_threshold": 2,
        "decline_slow_tier": "all",
    }
    engine = start(max_model_len=512, **settings)
    prompts = [prompt_of(48 + 16 * seed, seed) for seed in range(6)]
    rounds = []
    for number in range(3):
        names = [f"{number}.{i}" for i in range(len(prompts))]
        rounds.append(
            [run(engine, {name: prompt})[name] for name, prompt in zip(names, prompts, strict=True)]
        )
        assert engine.reset_prefix_cache()
    assert [tokens(o) for o in rounds[0]] == [tokens(o) for o in rounds[1]] == [tokens(o) for o in rounds[2]]
    assert [o.num_cached_tokens for o in (*rounds[0], *rounds[1])] == [0] * 12, "stored when had twice"
    connector = engine.engine_core.engine_core.scheduler.connector  # type: ignore[attr-defined]
    speed = connector.scheduler_manager.speed
    assert speed.prefill.samples >= 12
    assert speed.prefill.value > 0
    read = [o.num_cached_tokens for o in rounds[2] if o.num_cached_tokens]
    assert len(read) + speed.declines[CacheHitSource.HOST] == len(prompts), "each is read or declined"
    assert len(read) >= 4, "nothing is declined before four loads were seen"
    assert speed.loads[CacheHitSource.HOST].value > 0


def test_pfx_14_a_reset_empties_all_tiers_or_names_those_it_left() -> None:
    engine = start(**offload_settings())
    prompt = prompt_of(100)

    def reset(connector: bool) -> dict[str, Any]:
        report: dict[str, Any] = engine.engine_core.call_utility(
            "reset_prefix_cache_detailed", False, connector
        )
        return report

    run(engine, {"a": prompt})
    assert run(engine, {"b": prompt})["b"].num_cached_tokens == 96
    report = reset(connector=False)
    assert report["success"]
    device, below = report["tiers"]
    assert (device["asked"], device["success"], device["blocks_cached"]) == (True, True, 0)
    assert (below["asked"], below["success"], below["blocks_cached"]) == (False, None, 6)
    assert run(engine, {"c": prompt})["c"].num_cached_tokens == 96, "what was left is used"
    report = reset(connector=True)
    assert report["success"]
    assert all(tier["success"] and tier["blocks_cached"] == 0 for tier in report["tiers"])
    assert run(engine, {"d": prompt})["d"].num_cached_tokens == 0


def test_a_reset_by_tier_leaves_the_others_and_refuses_what_is_not_there() -> None:
    engine = start(**offload_settings())
    prompt = prompt_of(100)
    run(engine, {"a": prompt})
    report = engine.reset_prefix_cache_detailed(tiers=["host"])
    device, host = report["tiers"]
    assert report["success"]
    assert (host["asked"], host["blocks_dropped"], host["blocks_cached"]) == (True, 6, 0)
    assert (device["asked"], device["success"], device["blocks_cached"]) == (False, None, 6)
    assert run(engine, {"b": prompt})["b"].num_cached_tokens == 96, "the device has it"
    assert engine.reset_prefix_cache_detailed(tiers=["device"])["success"]
    assert run(engine, {"c": prompt})["c"].num_cached_tokens == 96, "what the device had was copied again"
    with pytest.raises(ValueError, match="tiers names 'disk'; this engine has device, host"):
        engine.reset_prefix_cache_detailed(tiers=["disk"])
    report = engine.reset_prefix_cache_detailed(reset_connector=True, tiers=["device"])
    assert [tier["blocks_cached"] for tier in report["tiers"]] == [0, 0]
    assert run(engine, {"d": prompt})["d"].num_cached_tokens == 0


def test_evt_11_events_leave_the_layout_of_a_hybrid_model_alone() -> None:
    endpoint = "inproc://evt-11"
    plain = start("glm5_next")
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    evented = start("glm5_next", kv_events_config=config)
    assert plain.cache_config.num_gpu_blocks == evented.cache_config.num_gpu_blocks
    groups = [engine.engine_core.call_utility("get_kv_cache_group_metadata") for engine in (plain, evented)]
    assert groups[0] == groups[1]
    assert len(groups[0]) > 1
    reader = zmq.Context.instance().socket(zmq.SUB)
    reader.setsockopt(zmq.SUBSCRIBE, b"")
    reader.connect(endpoint)
    time.sleep(0.1)
    run(evented, {"a": prompt_of(200)})
    assert reader.poll(2000)
    events = msgspec.msgpack.decode(reader.recv_multipart()[2])[1]
    stored = [event for event in events if event["type"] == "BlockStored"]
    assert {event["group_idx"] for event in stored} <= set(range(len(groups[0])))
    assert stored
    reader.close(linger=0)


def test_text_stop_strings_and_logprobs() -> None:
    engine = start()
    text = run(engine, {"a": "hello"}, greedy(24))["a"].outputs[0].text
    stop = text[4:6]
    stopped = run(engine, {"b": "hello"}, greedy(24, stop=[stop], logprobs=2))["b"].outputs[0]
    assert stopped.text == text[: text.find(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.logprobs is not None
    assert len(stopped.logprobs) == len(stopped.token_ids)
    for token_id, position in zip(stopped.token_ids, stopped.logprobs, strict=True):
        assert position[token_id].rank == 1
    assert engine.reset_prefix_cache(), "the request ended in the core too"


def test_pfx_13_prompt_logprobs_do_not_depend_on_the_cache() -> None:
    engine = start()
    prompt = prompt_of(33)
    run(engine, {"warm": prompt})
    first, second = (run(engine, {name: prompt}, greedy(prompt_logprobs=1))[name] for name in "ab")
    assert first.prompt_logprobs is not None
    assert second.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == len(second.prompt_logprobs) == 33
    for one, two, token in zip(
        first.prompt_logprobs[1:], second.prompt_logprobs[1:], prompt[1:], strict=True
    ):
        assert one is not None
        assert two is not None
        assert math.isfinite(one[token].logprob)
        assert one[token].logprob == pytest.approx(two[token].logprob, abs=1e-4)
    uncached = start(enable_prefix_caching=False)
    cold = run(uncached, {"a": prompt}, greedy(prompt_logprobs=1))["a"].prompt_logprobs
    assert cold is not None
    for one, two, token in zip(cold[1:], second.prompt_logprobs[1:], prompt[1:], strict=True):
        assert one is not None
        assert two is not None
        assert one[token].logprob == pytest.approx(two[token].logprob, abs=1e-4)


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE])
def test_samples_of_one_prompt(kind: RequestOutputKind) -> None:
    engine = start()
    params = SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True, output_kind=kind)
    seen: dict[int, list[int]] = {}
    engine.add_request("r", prompt_of(20), params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id == "r"
            seen.update({c.index: list(c.token_ids) for c in output.outputs})
    assert sorted(seen) == [0, 1, 2]
    assert len({tuple(ids) for ids in seen.values()}) == 3
    assert not engine.output_processor.parent_requests


def test_structured_output_obeys_its_constraint() -> None:
    engine = start()
    constraint = StructuredOutputsParams(regex="(ab){3}c")
    done = run(engine, {"a": "x", "b": "yy"}, SamplingParams(max_tokens=20, structured_outputs=constraint))
    assert {output.outputs[0].text for output in done.values()} == {"abababc"}


def test_a_grammar_is_compiled_beside_the_steps_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compilation ends only once the other request has its answer: it would never come if steps waited for it."""
    engine = start()
    others_done, compile_grammar = threading.Event(), GuidanceBackend.compile

    def compile_late(self: GuidanceBackend, params: StructuredOutputsParams) -> GuidanceGrammar:
        assert threading.current_thread() is not threading.main_thread()
        assert others_done.wait(60)
        return compile_grammar(self, params)

    monkeypatch.setattr(GuidanceBackend, "compile", compile_late)
    constrained = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(regex="(ab){3}c"))
    engine.add_request("hard", "x", constrained)
    engine.add_request("easy", prompt_of(5), greedy(6))
    ended: list[str] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                ended.append(output.request_id)
                others_done.set()
    assert ended == ["easy", "hard"]


def test_aborted_requests_leave_nothing() -> None:
    engine = start()
    for index in range(20):
        engine.add_request(f"r{index}", prompt_of(20 + index), greedy(50))
    for _ in range(4):
        engine.step()
    engine.abort_request([f"r{index}" for index in range(20)])
    assert not engine.has_unfinished_requests()
    run(engine, {"last": prompt_of(5)})
    assert engine.reset_prefix_cache()


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_failing_step_ends_its_requests_only(async_scheduling: bool) -> None:
    engine = start(
        distributed_executor_backend=FLAKY, async_scheduling=async_scheduling, max_num_batched_tokens=64
    )
    healthy = prompt_of(50)
    expected = tokens(run(engine, {"ref": healthy})["ref"])
    for round_number in range(3):
        bad = run(engine, {f"bad{round_number}": [*prompt_of(40, 5), *POISON]})[f"bad{round_number}"]
        assert bad.outputs[0].finish_reason == "error"
        assert "a poisoned token" in str(bad.outputs[0].stop_reason)
        assert tokens(run(engine, {f"ok{round_number}": healthy})[f"ok{round_number}"]) == expected
    # The failed prompt's computed part is not in the cache: it never was confirmed.
    assert run(engine, {"same": prompt_of(40, 5)})["same"].num_cached_tokens == 0
    assert engine.reset_prefix_cache()


def test_a_request_outside_the_failing_step_goes_on() -> None:
    """With room for one request per step, the waiting one never shares a step with the poisoned one."""
    engine = start(distributed_executor_backend=FLAKY, async_scheduling=False, max_num_seqs=1)
    expected = tokens(run(engine, {"ref": prompt_of(9)})["ref"])
    done = run(engine, {"bad": [5, *POISON], "waits": prompt_of(9)})
    assert done["bad"].outputs[0].finish_reason == "error"
    assert tokens(done["waits"]) == expected


def test_a_step_queued_behind_a_failing_one_loses_only_what_both_compute() -> None:
    engine = start(
        distributed_executor_backend="tests.helpers.faulty_executors.LatePoisonedExecutor",
        async_scheduling=True,
        max_num_batched_tokens=32,
    )
    expected = tokens(run(engine, {"ref": prompt_of(9)})["ref"])
    scheduler = engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    schedule, fail_step = scheduler.schedule, scheduler.fail_step
    steps: list[Any] = []
    failed: list[list[str]] = []

    def recorded() -> Any:
        steps.append(schedule())
        return steps[-1]

    def fails(output: Any, error: Any) -> Any:
        for step in steps[steps.index(output) :]:
            failed.append([name.split("-")[0] for name in step.num_scheduled_tokens])
        return fail_step(output, error)

    scheduler.schedule, scheduler.fail_step = recorded, fails
    # The prompt fills the first step, so that the other request begins in the step that is queued behind it.
    done = run(engine, {"bad": [*prompt_of(28, 5), *POISON], "good": prompt_of(9)})
    assert failed == [["bad"], ["bad", "good"]]
    assert done["bad"].outputs[0].finish_reason == "error"
    assert tokens(done["good"]) == expected


@pytest.mark.parametrize("name", ["glm5_next", "llama"])
def test_a_failing_step_with_the_cpu_tier_stores_nothing_of_it(name: str) -> None:
    engine = start(name, distributed_executor_backend=FLAKY, max_model_len=512, **offload_settings())
    prompt = prompt_of(200)
    run(engine, {"bad": [*prompt, *POISON]})
    assert engine.reset_prefix_cache()
    output = run(engine, {"good": prompt})["good"]
    assert output.num_cached_tokens == 0
    assert engine.reset_prefix_cache()
    again = run(engine, {"again": prompt})["again"]
    assert again.num_cached_tokens
    assert tokens(again) == tokens(output)


def test_bad_requests_never_reach_the_core() -> None:
    engine = start()
    for prompt in ([264], [], [5] * 256, {"prompt": "x", "cache_salt": ""}):
        with pytest.raises(VLLMValidationError):
            engine.add_request("bad", prompt, greedy())
    assert not engine.has_unfinished_requests()
    assert run(engine, {"good": [5]})["good"].finished


# -- control ---------------------------------------------------------------------------------------------------------


def test_pause_and_resume() -> None:
    engine = start()
    engine.add_request("r", prompt_of(9), greedy())
    engine.step()
    engine.pause_generation("keep", clear_cache=False)
    assert engine.is_paused()
    for _ in range(3):
        engine.step()
    assert engine.has_unfinished_requests()
    engine.resume_generation()
    assert run(engine, {})["r"].outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match="needs a core in a process of its own"):
        engine.pause_generation("wait")


def test_pause_that_aborts_ends_requests_and_empties_the_caches() -> None:
    engine = start(**offload_settings())
    prompt = prompt_of(100)
    run(engine, {"warm": prompt})
    engine.add_request("r", prompt_of(9), greedy(100))
    engine.step()
    engine.pause_generation("abort")
    assert run(engine, {})["r"].outputs[0].finish_reason == "abort"
    engine.resume_generation()
    assert run(engine, {"cold": prompt})["cold"].num_cached_tokens == 0


def test_a_running_request_survives_a_forced_reset() -> None:
    engine = start()
    expected = tokens(run(engine, {"ref": prompt_of(30)}, greedy(20))["ref"])
    engine.add_request("r", prompt_of(30), greedy(20))
    for _ in range(6):
        engine.step()
    assert not engine.reset_prefix_cache()
    assert engine.reset_prefix_cache(reset_running_requests=True)
    assert tokens(run(engine, {})["r"]) == expected


def test_sleep_and_wake_up() -> None:
    engine = start()
    expected = tokens(run(engine, {"a": prompt_of(30)})["a"])
    engine.sleep(1)
    assert engine.is_sleeping()
    engine.wake_up()
    assert not engine.is_sleeping()
    after = run(engine, {"b": prompt_of(30)})["b"]
    assert after.num_cached_tokens == 0
    assert tokens(after) == expected
    with pytest.raises(ValueError, match="level=5"):
        engine.sleep(5)
    with pytest.raises(ValueError, match="nothing"):
        engine.wake_up(["nothing"])


@pytest.mark.parametrize("name", ["HND", "NHD"])
def test_a_layout_of_the_environment_is_not_passed_over(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", name)
    with pytest.raises(ValueError, match=f"VLLM_KV_CACHE_LAYOUT='{name}' is not supported.*BLHNC"):
        start()


def test_metrics_count_what_happened() -> None:
    engine = start(disable_log_stats=False)
    run(engine, {"a": prompt_of(40)})
    run(engine, {"b": prompt_of(40)})
    values = {metric.name: metric for metric in engine.get_metrics()}
    read = {
        name: values[f"vllm:{name}"].value
        for name in ("prompt_tokens", "generation_tokens", "prefix_cache_hits")
    }  # type: ignore[attr-defined]
    assert read == {"prompt_tokens": 80, "generation_tokens": 16, "prefix_cache_hits": 32}
    assert values["vllm:num_requests_running"].value == 0  # type: ignore[attr-defined]


def test_metrics_tell_whether_the_engine_sleeps() -> None:
    engine = start(disable_log_stats=False)

    def awake() -> float:
        states = [metric for metric in engine.get_metrics() if metric.name == "vllm:engine_sleep_state"]
        return next(float(m.value) for m in states if m.labels["sleep_state"] == "awake")  # type: ignore[attr-defined]

    engine.sleep(1)
    assert awake() == 0
    engine.wake_up()
    assert awake() == 1
    engine.pause_generation()
    engine.release_kv_cache_memory()
    assert awake() == 0
    engine.resume_generation()
    assert awake() == 1
