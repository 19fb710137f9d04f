"""A CPU worker with tiny random models, driven by hand, against full-sequence forwards of the library's model."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.hand_scheduler import HandScheduler, poison_is_intact, start_worker
from tests.helpers.tiny_models import make_oracle, oracle_logits, save_oracle
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import GrammarOutput


def config_for(folder: Path, **cache) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(model=str(folder), dtype="float32", max_model_len=256),
        cache_config=CacheConfig(num_gpu_blocks_override=200, kv_cache_memory_bytes=2**26, **cache),
        scheduler_config=SchedulerConfig.default_factory(
            max_model_len=256, max_num_batched_tokens=256, max_num_seqs=8, async_scheduling=False
        ),
    )


class Rig:
    """A worker that all tests of a model share; each test gets a fresh hand scheduler."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.oracle = make_oracle(kind)
        save_oracle(self.oracle, folder)
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.worker, self.plan = start_worker(config_for(folder))

    def scheduler(self, seed: int = 0) -> HandScheduler:
        return HandScheduler(self.worker, self.plan, seed)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        outputs = self.answers.setdefault(tuple(prompt), [])
        while len(outputs) < count:
            outputs.append(int(oracle_logits(self.oracle, [*prompt, *outputs])[-1].argmax()))
        return outputs[:count]


@pytest.fixture(scope="module", params=["llama", "mistral", "glm5_next", "gemma4_text"])
def rig(request, tmp_path_factory) -> Rig:
    return Rig(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def hand(rig: Rig):
    scheduler = rig.scheduler()
    yield scheduler
    for req_id in list(scheduler.requests):
        scheduler.finish(req_id)
    scheduler.step({})
    assert rig.worker.model_runner.states.by_id == {}
    assert poison_is_intact(scheduler)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 256) for _ in range(length)]


def test_a_prompt_in_one_piece_and_its_decodes(rig, hand) -> None:
    prompt = prompt_of(21)
    hand.add("a", prompt)
    assert hand.run_alone("a", 8) == rig.greedy(prompt, 8)


def test_chunked_prefill_gives_the_same_tokens(rig, hand) -> None:
    prompt = prompt_of(50, 1)
    expected = rig.greedy(prompt, 4)
    hand.add("a", prompt)
    assert hand.step({"a": 16}) == {}
    assert hand.step({"a": 32}) == {}
    assert hand.last_output.sampled_token_ids == [[]]
    assert hand.run_alone("a", 4) == expected


def test_decodes_and_chunks_share_steps(rig, hand) -> None:
    prompts = {"a": prompt_of(9, 2), "b": prompt_of(40, 3), "c": prompt_of(17, 4)}
    for req_id, prompt in prompts.items():
        hand.add(req_id, prompt)
    assert set(hand.step({"a": 9})) == {"a"}
    assert set(hand.step({"b": 16, "a": 1})) == {"a"}
    assert set(hand.step({"b": 16, "c": 16, "a": 1})) == {"a"}
    assert set(hand.step({"b": 8, "a": 1, "c": 1})) == {"a", "b", "c"}
    for _ in range(3):
        assert set(hand.step({"c": 1, "a": 1, "b": 1})) == {"a", "b", "c"}
    for req_id, prompt in prompts.items():
        outputs = hand.requests[req_id].outputs
        assert outputs == rig.greedy(prompt, len(outputs))


def test_a_request_may_sit_out_steps(rig, hand) -> None:
    prompts = {"a": prompt_of(9, 5), "b": prompt_of(12, 6)}
    for req_id, prompt in prompts.items():
        hand.add(req_id, prompt)
    hand.step({"a": 9, "b": 12})
    hand.step({"b": 1})
    hand.step({"b": 1})
    hand.step({"a": 1})
    hand.step({"a": 1, "b": 1})
    for req_id, prompt in prompts.items():
        outputs = hand.requests[req_id].outputs
        assert outputs == rig.greedy(prompt, len(outputs))


def test_preempted_requests_go_on_where_they_were(rig, hand) -> None:
    prompts = {"a": prompt_of(20, 7), "b": prompt_of(20, 8)}
    for req_id, prompt in prompts.items():
        hand.add(req_id, prompt)
    hand.step({"a": 20, "b": 20})
    hand.step({"a": 1, "b": 1})
    hand.preempt("b")
    hand.step({"a": 1})
    hand.step({"a": 1, "b": 16})
    hand.step({"a": 1, "b": 6})
    hand.step({"a": 1, "b": 1})
    assert len(hand.requests["b"].outputs) == 4
    for req_id, prompt in prompts.items():
        outputs = hand.requests[req_id].outputs
        assert outputs == rig.greedy(prompt, len(outputs))


def test_a_prefix_hit_starts_in_the_middle(rig, hand) -> None:
    unit = hand.block_unit
    stem = prompt_of(2 * unit, 9)
    hand.add("a", stem + prompt_of(3, 10))
    hand.step({"a": unit})
    hand.step({"a": unit})
    hand.add("b", stem + prompt_of(7, 11))
    hand.share_prefix("b", "a", 2 * unit)
    hand.add("c", stem[:unit] + prompt_of(5, 12))
    hand.share_prefix("c", "a", unit)
    hand.step({"a": 3, "b": 7, "c": 5})
    hand.step({"c": 1, "a": 1, "b": 1})
    for req_id in ("a", "b", "c"):
        request = hand.requests[req_id]
        assert request.outputs == rig.greedy(request.prompt, 2)


def test_pfx_02_a_hit_behind_a_prompt_that_ended_just_past_a_boundary(rig, hand) -> None:
    unit = hand.block_unit
    stem, question = prompt_of(unit, 40), prompt_of(4, 41)
    expected = rig.greedy([*stem, *question], 2)
    for r in range(17):
        hand.add("a", [*stem, *prompt_of(r, 42)])
        hand.step({"a": unit})
        if r:
            hand.step({"a": r})
        hand.add("b", [*stem, *question])
        hand.share_prefix("b", "a", unit)
        hand.step({"b": 4, "a": 1})
        hand.step({"b": 1})
        assert hand.last_output.num_nans_in_logits is None
        assert hand.finish("b").outputs == expected
        hand.finish("a")


def test_an_aborted_request_leaves_the_others_alone(rig, hand) -> None:
    prompts = {"a": prompt_of(9, 12), "b": prompt_of(12, 13)}
    for req_id, prompt in prompts.items():
        hand.add(req_id, prompt)
    hand.step({"a": 9, "b": 12})
    hand.finish("a")
    hand.step({"b": 1})
    hand.add("a", prompt_of(5, 14))
    hand.step({"a": 5, "b": 1})
    assert hand.requests["b"].outputs == rig.greedy(prompts["b"], 3)
    assert hand.requests["a"].outputs == rig.greedy(prompt_of(5, 14), 1)


def test_random_schedules_never_change_an_output(rig) -> None:
    rng = random.Random(17)
    hand = rig.scheduler(3)
    expected = {i: (prompt_of(rng.randrange(1, 60), 20 + i), 6) for i in range(8)}
    answers = {i: rig.greedy(prompt, count) for i, (prompt, count) in expected.items()}
    waiting = list(expected)
    preemptions = 0
    while waiting or hand.requests:
        if waiting and len(hand.requests) < 5:
            number = waiting.pop()
            hand.add(str(number), expected[number][0])
        scheduled = {}
        for req_id, request in hand.requests.items():
            left = len(request.tokens) - request.computed
            if rng.random() < 0.8:
                # Recurrent states exist at block ends, so chunks end there unless they reach the last token.
                cut = hand.block_unit - request.computed % hand.block_unit
                scheduled[req_id] = left if left <= cut or rng.random() < 0.5 else cut
        hand.step(scheduled)
        for req_id, request in list(hand.requests.items()):
            if len(request.outputs) >= 6:
                assert hand.finish(req_id).outputs[:6] == answers[int(req_id)]
            elif rng.random() < 0.06:
                hand.preempt(req_id)
                preemptions += 1
    assert preemptions > 0
    hand.step({})
    assert rig.worker.model_runner.states.by_id == {}


def test_logprobs_match_the_full_forward(rig, hand) -> None:
    prompt = prompt_of(18, 15)
    hand.add("a", prompt, SamplingParams(temperature=0.0, logprobs=3))
    hand.add("b", prompt_of(4, 16))
    hand.step({"a": 18, "b": 4})
    hand.step({"b": 1, "a": 1})
    request = hand.requests["a"]
    reference = oracle_logits(rig.oracle, request.tokens[:-1])[-1].log_softmax(-1)
    logprobs = hand.last_output.logprobs.slice_request(hand.last_output.req_id_to_index["a"], 1)
    top = reference.topk(3)
    assert logprobs.logprob_token_ids[0].tolist() == [request.outputs[-1], *top.indices.tolist()]
    assert logprobs.logprobs[0].tolist() == pytest.approx(
        [top.values[0].item(), *top.values.tolist()], abs=1e-3
    )
    assert logprobs.sampled_token_ranks.tolist() == [1]


def test_prompt_logprobs_arrive_when_the_prompt_ends(rig, hand) -> None:
    prompt = prompt_of(40, 17)
    hand.add("a", prompt, SamplingParams(temperature=0.0, prompt_logprobs=2, prompt_logprob_token_ids=[5, 6]))
    hand.step({"a": 16})
    assert hand.last_output.prompt_logprobs_dict == {}
    hand.step({"a": 24})
    found = hand.last_output.prompt_logprobs_dict["a"]
    reference = oracle_logits(rig.oracle, prompt).log_softmax(-1)
    chosen = reference[torch.arange(39), torch.tensor(prompt[1:])]
    assert found.logprob_token_ids[:, 0].tolist() == prompt[1:]
    assert torch.allclose(found.logprobs[:, 0], chosen, atol=1e-3)
    specific = torch.tensor(hand.last_output.prompt_token_id_logprobs_dict["a"])
    assert torch.allclose(specific, reference[:39, [5, 6]], atol=1e-3)
    hand.step({"a": 1})
    hand.preempt("a")
    hand.step({"a": 42})
    assert hand.last_output.prompt_logprobs_dict == {}


def mixed_params(seed: int | None) -> SamplingParams:
    return SamplingParams(
        temperature=0.9,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        seed=seed,
        repetition_penalty=1.2,
        presence_penalty=0.3,
    )


@pytest.mark.parametrize("seed", [None, 5])
def test_sampled_tokens_do_not_depend_on_mates_chunks_or_preemption(rig, seed) -> None:
    prompt = prompt_of(37, 18)
    alone = rig.scheduler(1)
    alone.add("x", prompt, mixed_params(seed))
    expected = list(alone.run_alone("x", 8))
    alone.finish("x")
    alone.step({})
    hand = rig.scheduler(2)
    hand.add("x", prompt, mixed_params(seed))
    hand.add("m", prompt_of(5, 19), SamplingParams(temperature=1.3, top_k=3))
    hand.add("n", prompt_of(7, 20))
    hand.step({"m": 5, "x": 16})
    hand.step({"n": 7, "m": 1, "x": 16})
    hand.step({"x": 5, "n": 1})
    hand.step({"x": 1, "n": 1})
    hand.preempt("x")
    hand.finish("m")
    hand.step({"n": 1, "x": 39})
    hand.step({"x": 1})
    hand.run_alone("x", 8)
    assert hand.finish("x").outputs[:8] == expected
    hand.finish("n")
    hand.step({})


def test_penalties_and_rules_see_the_whole_history(rig, hand) -> None:
    prompt = prompt_of(10, 21)
    first = rig.greedy(prompt, 1)[0]
    hand.add("a", prompt, SamplingParams(temperature=0.0, frequency_penalty=2.0, max_tokens=None))
    hand.add("b", prompt, SamplingParams(temperature=0.0, allowed_token_ids=[7, 9]))
    hand.add("c", prompt, SamplingParams(temperature=0.0, logit_bias={11: 100.0}))
    stopping = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[first])
    hand.add("d", prompt, stopping)
    hand.step(dict.fromkeys("abcd", 10))
    for _ in range(5):
        hand.step(dict.fromkeys("abcd", 1))
    outputs = {req_id: hand.requests[req_id].outputs for req_id in "abcd"}
    assert set(outputs["b"]) <= {7, 9}
    assert set(outputs["c"]) == {11}
    assert first not in outputs["d"][:2]
    tokens = list(prompt)
    for token in outputs["a"]:
        logits = oracle_logits(rig.oracle, tokens)[-1]
        for seen in tokens[10:]:
            logits[seen] -= 2.0
        assert int(logits.argmax()) == token
        tokens.append(token)


def test_recorded_outputs_are_replayed_and_then_sampling_goes_on(rig, hand) -> None:
    prompt = prompt_of(12, 33)
    hand.add("a", prompt, SamplingParams(temperature=0.0, trace_decode_token_ids=[40, 41], logprobs=0))
    hand.add("b", prompt)
    hand.step({"a": 12, "b": 12})
    hand.step({"a": 1, "b": 1})
    reference = oracle_logits(rig.oracle, [*prompt, 40])[-1].log_softmax(-1)
    row = hand.last_output.req_id_to_index["a"]
    assert hand.last_output.logprobs.logprobs[row, 0] == pytest.approx(reference[41].item(), abs=1e-3)
    hand.step({"a": 1, "b": 1})
    assert hand.requests["a"].outputs == [40, 41, *rig.greedy([*prompt, 40, 41], 1)]
    assert hand.requests["b"].outputs == rig.greedy(prompt, 3)


def bitmask(allowed: list[list[int]], vocab: int = 300) -> np.ndarray:
    mask = np.zeros((len(allowed), -(-vocab // 32)), dtype=np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            mask[row, token // 32] |= np.uint32(1 << token % 32)
    return mask.view(np.int32)


def test_grammar_masks_restrict_their_requests_only(rig, hand) -> None:
    prompt = prompt_of(6, 22)
    for req_id in "abc":
        hand.add(req_id, prompt)
    sampled = hand.step(
        {"a": 6, "b": 6, "c": 3}, GrammarOutput(["b", "gone", "c"], bitmask([[31, 32, 200], [1], [2]]))
    )
    assert sampled["b"] in (31, 32, 200)
    assert sampled["a"] == rig.greedy(prompt, 1)[0]


def test_val_10_a_request_with_nan_logits_ends_alone(rig, hand, monkeypatch) -> None:
    runner = rig.worker.model_runner
    prompts = {"a": prompt_of(6, 23), "b": prompt_of(8, 24)}
    for req_id, prompt in prompts.items():
        hand.add(req_id, prompt)
    compute = runner.model.compute_logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        logits[runner.sampling.row_of("a"), :3] = float("nan")
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "compute_logits", poisoned)
        sampled = hand.step({"a": 6, "b": 8})
    assert hand.last_output.num_nans_in_logits == {"a": 3}
    assert sampled == {"b": rig.greedy(prompts["b"], 1)[0]}
    hand.finish("a")
    hand.step({"b": 1})
    assert hand.last_output.num_nans_in_logits is None
    assert hand.requests["b"].outputs == rig.greedy(prompts["b"], 2)


def test_a_request_whose_grammar_allows_nothing_ends_alone(rig, hand) -> None:
    prompt = prompt_of(6, 25)
    hand.add("a", prompt)
    hand.add("b", prompt)
    sampled = hand.step({"a": 6, "b": 6}, GrammarOutput(["a"], bitmask([[]])))
    assert hand.last_output.num_nans_in_logits == {"a": 1}
    assert set(sampled) == {"b"}
    hand.finish("a")


def test_a_failed_forward_leaves_the_worker_usable(rig, hand, monkeypatch) -> None:
    prompts = {"a": prompt_of(6, 26), "b": prompt_of(8, 27)}
    for req_id, prompt in prompts.items():
        hand.add(req_id, prompt)
    hand.step({"a": 6, "b": 8})
    runner = rig.worker.model_runner

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("kernel failed")

    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "forward", broken)
        output = hand.build({"a": 1})
        with pytest.raises(RuntimeError, match="kernel failed"):
            rig.worker.execute_model(output)
    assert rig.worker.sample_tokens(None) is None
    queued = hand.step({"a": 1, "b": 1})
    assert set(queued) == {"b"}
    assert hand.step({"a": 1}) == {}
    hand.finish("a")
    hand.step({"b": 1})
    assert hand.requests["b"].outputs == rig.greedy(prompts["b"], 3)


def test_a_failed_sampling_leaves_the_worker_usable(rig, hand, monkeypatch) -> None:
    prompts = {"a": prompt_of(6, 31), "b": prompt_of(8, 32)}
    hand.add("a", prompts["a"])
    hand.add("b", prompts["b"])
    hand.step({"b": 8})
    runner = rig.worker.model_runner

    def broken(*_: object) -> None:
        raise RuntimeError("sampler failed")

    with monkeypatch.context() as patch:
        patch.setattr(runner.row_sampler, "sample", broken)
        assert rig.worker.execute_model(hand.build({"a": 6})) is None
        with pytest.raises(RuntimeError, match="sampler failed"):
            rig.worker.sample_tokens(None)
    hand.finish("a")
    hand.add("a", prompts["a"])
    hand.step({"b": 1, "a": 6})
    for req_id, count in (("a", 1), ("b", 2)):
        assert hand.requests[req_id].outputs == rig.greedy(prompts[req_id], count)


def test_block_orders_are_carried_out_before_the_forward(rig, hand) -> None:
    hand.add("a", prompt_of(4, 28))
    spare, other = hand.free[0], hand.free[1]
    try:
        hand.step({"a": 4}, new_block_ids_to_zero=[spare], kv_cache_block_copies=[(spare, other)])
        for tensor in hand.raw.values():
            assert not tensor[[spare, other]].any()
    finally:
        hand._poison(spare)
        hand._poison(other)


def test_a_step_without_tokens_answers_at_once(rig, hand) -> None:
    output = rig.worker.execute_model(hand.build({}))
    assert output is not None
    assert output.req_ids == []
    assert rig.worker.sample_tokens(None) is None
