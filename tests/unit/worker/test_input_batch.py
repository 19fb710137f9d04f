"""The worker's copy of its requests follows scheduler outputs and its own sampled tokens."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.steps import cached_requests, new_request, step_output
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.input_batch import RequestStates


@pytest.fixture
def states() -> RequestStates:
    return RequestStates(num_slots=2, max_model_len=4096, widths=[8], engine_seed=0)


def tokens_of(states: RequestStates, req_id: str) -> list[int]:
    slot = states.by_id[req_id].slot
    return states.tokens[slot, : states.num_tokens[slot]].tolist()


def sample(states: RequestStates, **tokens: int) -> None:
    requests = [states.by_id[req_id] for req_id in tokens]
    states.append_sampled(requests, states.slots_of(tokens), list(tokens.values()))


def test_a_new_request_takes_a_slot_with_its_tokens_and_blocks(states) -> None:
    states.apply(step_output({"a": 3}, [new_request("a", [4, 5, 6], [[2]])]))
    state = states.by_id["a"]
    assert tokens_of(states, "a") == [4, 5, 6]
    assert states.block_tables[0].ids[state.slot, 0] == 2
    assert states.num_computed[state.slot] == 0


def test_own_sampled_tokens_are_fed_back(states) -> None:
    states.apply(
        step_output({"a": 2, "b": 1}, [new_request("a", [4, 5], [[1]]), new_request("b", [9], [[2]])])
    )
    sample(states, b=8, a=7)
    assert tokens_of(states, "a") == [4, 5, 7]
    assert states.by_id["b"].output_token_ids == [8]
    states.apply(step_output({"a": 1}, cached=cached_requests([("a", [[3]], 2, 1)])))
    slot = states.by_id["a"].slot
    assert states.num_computed[slot] == 2
    assert states.block_tables[0].ids[slot, :2].tolist() == [1, 3]


def test_finished_requests_are_forgotten_and_unknown_ends_ignored(states) -> None:
    states.apply(step_output({"a": 1}, [new_request("a", [4], [[1]])]))
    states.apply(step_output({}, finished_req_ids={"a", "never seen"}))
    assert states.by_id == {}
    assert not states.block_tables[0].ids.any()
    states.apply(step_output({"b": 1, "c": 1}, [new_request("b", [4], [[1]]), new_request("c", [4], [[2]])]))
    assert sorted(s.slot for s in states.by_id.values()) == [0, 1]


def test_a_preempted_request_resumes_as_a_new_one_with_all_tokens(states) -> None:
    states.apply(step_output({"a": 2}, [new_request("a", [4, 5], [[1]])]))
    sample(states, a=6)
    seed = states.by_id["a"].seed
    states.apply(step_output({}, preempted_req_ids={"a"}))
    assert states.by_id["a"].slot == -1
    again = new_request("a", [4, 5], [[7]], num_computed=1, prefill=[4, 5, 6])
    states.apply(step_output({"a": 2}, [again]))
    state = states.by_id["a"]
    assert tokens_of(states, "a") == [4, 5, 6]
    assert state.output_token_ids == [6]
    assert states.num_computed[state.slot] == 1
    assert state.seed == seed
    assert states.block_tables[0].ids[state.slot].tolist()[:2] == [7, 0]


def test_preempted_and_resumed_in_one_output(states) -> None:
    states.apply(step_output({"a": 2}, [new_request("a", [4, 5], [[1, 2]])]))
    again = new_request("a", [4, 5], [[7]], prefill=[4, 5])
    states.apply(step_output({"a": 2}, [again], preempted_req_ids={"a"}))
    assert states.block_tables[0].ids[states.by_id["a"].slot].tolist()[:2] == [7, 0]


def test_v1_form_resumes_a_known_request_with_replaced_blocks(states) -> None:
    states.apply(step_output({"a": 2}, [new_request("a", [4, 5], [[1, 2]])]))
    states.apply(step_output({}, preempted_req_ids={"a"}))
    cached = cached_requests([("a", [[9]], 0, 1)])
    cached.resumed_req_ids.add("a")
    cached.all_token_ids["a"] = [4, 5, 6]
    states.apply(step_output({"a": 3}, cached=cached))
    assert tokens_of(states, "a") == [4, 5, 6]
    assert states.block_tables[0].ids[states.by_id["a"].slot].tolist()[:2] == [9, 0]


def test_discarded_outputs_are_taken_back(states) -> None:
    states.apply(step_output({"a": 2}, [new_request("a", [4, 5], [[1]])]))
    outputs = states.by_id["a"].output_token_ids
    sample(states, a=6)
    states.apply(step_output({"a": 2}, cached=cached_requests([("a", None, 0, 0)])))
    assert tokens_of(states, "a") == [4, 5]
    assert outputs == []


def test_unknown_ids_raise_and_leave_rows_alone(states) -> None:
    states.apply(step_output({"a": 1}, [new_request("a", [4], [[1]])]))
    bad = cached_requests([("a", [[5]], 1, 0), ("ghost", None, 3, 1)])
    with pytest.raises(ValueError, match="ghost is scheduled as known"):
        states.apply(step_output({"a": 1, "ghost": 1}, cached=bad))
    slot = states.by_id["a"].slot
    assert states.num_computed[slot] == 0
    assert states.block_tables[0].ids[slot].tolist()[:2] == [1, 0]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (step_output({"x": 1}), "x have scheduled tokens but no request data"),
        (
            step_output({"x": 1}, [new_request("x", None, [[1]])]),
            "request x: this runner needs prompt_token_ids",
        ),
        (step_output({"x": 1}, [new_request("x", [1], [[1], [2]])]), "request x: block ids of 2 groups"),
    ],
)
def test_outputs_that_cannot_be_run_are_refused(states, output, message) -> None:
    with pytest.raises(ValueError, match=message):
        states.apply(output)
    assert states.by_id == {}


def test_a_preempted_request_cannot_go_on_without_its_blocks(states) -> None:
    states.apply(step_output({"a": 1}, [new_request("a", [4], [[1]])]))
    states.apply(step_output({}, preempted_req_ids={"a"}))
    with pytest.raises(ValueError, match="a was preempted and must be resumed"):
        states.apply(step_output({"a": 1}, cached=cached_requests([("a", None, 1, 0)])))


def test_prompts_longer_than_the_first_width_and_many_requests_make_room(states) -> None:
    long = list(range(3000))
    states.apply(step_output({"a": 3000}, [new_request("a", long, [[1]])]))
    assert tokens_of(states, "a") == long
    more = [new_request(f"r{i}", [i], [[i]]) for i in range(5)]
    states.apply(step_output({r.req_id: 1 for r in more}, more))
    assert len({s.slot for s in states.by_id.values()}) == 6
    assert tokens_of(states, "r4") == [4]


def test_seeds_are_taken_from_the_request_or_made_from_its_id(states) -> None:
    given = new_request("a", [1], [[1]], SamplingParams(seed=11))
    free = new_request("b", [1], [[2]], SamplingParams())
    states.apply(step_output({"a": 1, "b": 1}, [given, free]))
    assert states.by_id["a"].seed == 11
    other = RequestStates(2, 64, [8], engine_seed=1)
    other.apply(step_output({"b": 1}, [free]))
    assert other.by_id["b"].seed != states.by_id["b"].seed


def test_sampling_at_the_very_end_of_the_width_widens_it() -> None:
    states = RequestStates(1, 8, [8], 0)
    states.apply(step_output({"a": 9}, [new_request("a", list(range(9)), [[1]])]))
    sample(states, a=3)
    assert tokens_of(states, "a")[-1] == 3
    assert isinstance(states.tokens, np.ndarray)


def test_requests_of_a_failed_step_get_no_rows_until_they_end(states) -> None:
    states.apply(step_output({"a": 1, "b": 1}, [new_request("a", [4], [[1]]), new_request("b", [5], [[2]])]))
    states.give_up(["a", "never added"])
    scheduled = {"a": 1, "b": 1, "never added": 1}
    rows = [("a", None, 1, 1), ("b", [[3]], 1, 0), ("never added", None, 1, 1)]
    states.apply(step_output(scheduled, cached=cached_requests(rows)))
    assert states.runnable(scheduled) == {"b": 1}
    states.apply(step_output({"b": 1}, cached=cached_requests([("b", None, 1, 0)]), finished_req_ids={"a"}))
    states.apply(step_output({"a": 1}, [new_request("a", [4], [[1]])]))
    assert states.runnable({"a": 1, "b": 1}) == {"a": 1, "b": 1}


def test_a_request_that_was_given_up_may_be_sent_anew(states) -> None:
    states.give_up(["a"])
    states.apply(step_output({"a": 1}, [new_request("a", [4], [[1]])]))
    assert states.runnable({"a": 1}) == {"a": 1}
