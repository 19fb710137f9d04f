"""Rows of logits: kept stable, reported to processors, and turned into sampling metadata."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.helpers.steps import new_request, step_output
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, LogitsProcessors, MoveDirectionality
from vllm.v1.worker.input_batch import RequestStates
from vllm.v1.worker.sampling_rows import SamplingRows

VOCAB = 64


class Follower(LogitsProcessor):
    """Keeps row → id from batch updates alone (requests carry their id in `extra_args`)."""

    def __init__(self) -> None:
        self.rows: dict[int, str] = {}
        self.updates: list[BatchUpdate | None] = []

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(batch_update)
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.rows.pop(row, None)
        for row, params, _, _ in batch_update.added:
            self.rows[row] = params.extra_args["id"]
        for source, target, direction in batch_update.moved:
            assert direction is MoveDirectionality.UNIDIRECTIONAL
            self.rows[target] = self.rows.pop(source)


class Bench:
    def __init__(self) -> None:
        self.follower = Follower()
        self.states = RequestStates(16, 64, [4], 0)
        self.rows = SamplingRows(VOCAB, torch.device("cpu"), LogitsProcessors([self.follower]))

    def add(self, req_id: str, **params) -> None:
        params = SamplingParams(extra_args={"id": req_id}, **{"temperature": 0.0, **params})
        self.states.apply(step_output({req_id: 3}, [new_request(req_id, [1, 2, 3], [[1]], params)]))

    def update(self, *req_ids: str):
        self.rows.update([self.states.by_id[req_id] for req_id in req_ids])
        return self.rows.metadata(self.states)

    @property
    def order(self) -> list[str]:
        return [request.req_id for request in self.rows.requests]


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    for req_id in "abcde":
        bench.add(req_id)
    return bench


def test_rows_stay_where_they_are(bench) -> None:
    bench.update("a", "b", "c")
    assert bench.order == ["a", "b", "c"]
    bench.update("c", "b", "a")
    assert bench.order == ["a", "b", "c"]
    assert bench.follower.updates[-1] is None


def test_a_free_row_goes_to_an_arrival_or_is_filled_from_the_end(bench) -> None:
    bench.update("a", "b", "c")
    bench.update("d", "b", "c")
    assert bench.order == ["d", "b", "c"]
    bench.update("b", "c")
    assert bench.order == ["c", "b"]
    assert bench.follower.rows == {0: "c", 1: "b"}
    bench.update()
    assert bench.order == []
    assert bench.follower.rows == {}


def test_random_changes_keep_rows_and_processors_in_step(bench) -> None:
    rng = random.Random(2)
    for _ in range(300):
        chosen = rng.sample("abcde", rng.randrange(6))
        bench.update(*chosen)
        assert sorted(bench.order) == sorted(chosen)
        assert bench.follower.rows == dict(enumerate(bench.order))
        assert all(bench.rows.row_of(req_id) == row for row, req_id in enumerate(bench.order))
        assert bench.rows.slots.tolist() == [bench.states.by_id[r].slot for r in bench.order]


def test_a_request_replaced_under_its_name_is_a_new_one(bench) -> None:
    bench.update("a", "b")
    bench.add("a", temperature=0.7)
    metadata = bench.update("a", "b")
    assert metadata.temperature.tolist() == pytest.approx([0.7, 0.0])
    assert bench.rows.requests[0] is bench.states.by_id["a"]


def test_a_request_resumed_in_the_same_step_gets_its_new_slot(bench) -> None:
    bench.update("a", "b")
    state = bench.states.by_id["a"]
    bench.states.preempt("a")
    bench.states.preempt("b")
    state.slot, bench.states.by_id["b"].slot = 9, 8
    bench.update("a", "b")
    assert bench.rows.slots.tolist() == [9, 8]


def test_greedy_rows_need_nothing(bench) -> None:
    metadata = bench.update("a", "b")
    assert metadata.all_greedy
    assert not metadata.all_random
    assert metadata.temperature is None
    assert metadata.top_k is metadata.top_p is metadata.draws is metadata.max_num_logprobs is None
    assert metadata.no_penalties
    assert bench.update("a", "b") is metadata


def test_parameters_land_in_their_rows() -> None:
    bench = Bench()
    bench.add("a", temperature=0.5, top_k=5, top_p=0.9, logprobs=2)
    bench.add("b", temperature=1.5, top_k=VOCAB + 1)
    bench.add("c", allowed_token_ids=[3, VOCAB + 9], logprob_token_ids=[4, 5, 6])
    metadata = bench.update("a", "b", "c")
    assert not metadata.all_greedy
    assert not metadata.all_random
    assert metadata.temperature.tolist() == pytest.approx([0.5, 1.5, 0.0])
    assert metadata.top_k.tolist() == [5, VOCAB, VOCAB]
    assert metadata.top_p.tolist() == pytest.approx([0.9, 1.0, 1.0])
    assert metadata.max_num_logprobs == 3
    assert metadata.logprob_token_ids == {2: [4, 5, 6]}
    assert metadata.allowed_token_ids_mask[2].logical_not().nonzero().flatten().tolist() == [3]
    assert not metadata.allowed_token_ids_mask[:2].any()


def test_all_logprobs_win() -> None:
    bench = Bench()
    bench.add("a", logprobs=-1)
    bench.add("b", logprobs=3)
    bench.add("c")
    metadata = bench.update("a", "b", "c")
    assert metadata.max_num_logprobs == -1
    assert metadata.num_logprobs == [-1, 3, None]


def test_draws_depend_on_seed_and_position_alone() -> None:
    bench = Bench()
    bench.add("a", temperature=1.0, seed=7)
    bench.add("b", temperature=1.0, seed=7)
    bench.add("c", temperature=1.0)
    first = bench.update("a", "b", "c").draws
    assert first[0] == first[1] != first[2]
    bench.states.append_sampled([bench.states.by_id["a"]], bench.states.slots_of("a"), [9])
    second = bench.update("c", "b", "a").draws
    assert second[1:].tolist() == first[1:].tolist()
    assert second[0] != first[0]


def test_counts_follow_sampled_tokens_while_the_request_samples() -> None:
    bench = Bench()
    bench.add("a", repetition_penalty=1.5)
    bench.add("b", presence_penalty=1.0)
    bench.add("c")

    def counted() -> list[tuple[int, int, float]]:
        found = bench.update("a", "b", "c").counted_tokens
        return list(zip(found.rows.tolist(), found.tokens.tolist(), found.counts.tolist(), strict=True))

    assert counted() == [(0, 1, 0.0), (0, 2, 0.0), (0, 3, 0.0)]
    requests = [bench.states.by_id[r] for r in "abc"]
    bench.states.append_sampled(requests, np.array([r.slot for r in requests]), [2, 2, 2])
    assert counted() == [(0, 1, 0.0), (0, 2, 1.0), (0, 3, 0.0), (1, 2, 1.0)]
    bench.update("b")
    bench.states.append_sampled(requests[:1], np.array([requests[0].slot]), [9])
    assert (0, 9, 1.0) in counted() or (1, 9, 1.0) in counted()


def test_discarded_outputs_leave_the_counts() -> None:
    bench = Bench()
    bench.add("a", frequency_penalty=1.0)
    bench.update("a")
    request = bench.states.by_id["a"]
    bench.states.append_sampled([request], bench.states.slots_of("a"), [5])
    assert bench.update("a").counted_tokens.tokens.tolist() == [5]
    del request.output_token_ids[:]
    assert bench.update("a").counted_tokens.tokens.tolist() == []


def test_metadata_needs_rows_first() -> None:
    bench = Bench()
    with pytest.raises(RuntimeError, match="update"):
        bench.rows.metadata(bench.states)


class Failing(Follower):
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        raise ZeroDivisionError


def test_processors_behind_one_that_fails_follow_all_the_same() -> None:
    bench = Bench()
    bench.rows = SamplingRows(VOCAB, torch.device("cpu"), LogitsProcessors([Failing(), bench.follower]))
    for name in "abc":
        bench.add(name)
    for names in ("abc", "c"):
        with pytest.raises(ZeroDivisionError):
            bench.update(*names)
    assert bench.follower.rows == {0: "c"}
