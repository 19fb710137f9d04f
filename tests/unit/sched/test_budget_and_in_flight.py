"""The budget of a pass, and the steps under way."""

from __future__ import annotations

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.budget import StepBudget
from vllm.v1.core.sched.in_flight import BlockUse, InFlightSteps, StepRecord
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


def request(name: str, lora: int | None = None) -> Request:
    adapter = None if lora is None else LoRARequest(f"lora{lora}", lora, "/nowhere")
    return Request(name, [1], SamplingParams(), None, arrival_time=0.0, lora_request=adapter)


def step(seq: int, *ids: str, partial: tuple[str, ...] = ()) -> StepRecord:
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = dict.fromkeys(ids, 1)
    output.total_num_scheduled_tokens = len(ids)
    return StepRecord(output, seq, set(partial))


def test_budget_charges_draft_slots_to_the_input_only() -> None:
    budget = StepBudget(tokens=10, input_tokens=12, draft_slots=3)
    assert budget.limit() == 9
    budget.spend(4)
    assert (budget.tokens, budget.input_tokens) == (6, 5)
    assert budget.limit() == 2
    budget.refund(4)
    assert (budget.tokens, budget.input_tokens) == (10, 12)


def test_budget_limits_adapters() -> None:
    budget = StepBudget(10, 10, max_loras=1)
    first, same, other, plain = request("a", 1), request("b", 1), request("c", 2), request("d")
    assert budget.allows_lora(first)
    budget.add_lora(first)
    assert budget.allows_lora(same)
    assert not budget.allows_lora(other)
    assert budget.allows_lora(plain)
    budget.add_lora(same)
    budget.remove_lora(first)
    assert not budget.allows_lora(other)
    budget.remove_lora(same)
    assert budget.allows_lora(other)


def test_steps_are_found_by_identity_and_in_any_order() -> None:
    steps = InFlightSteps()
    first, second = step(1, "a"), step(2, "a", "b")
    steps.push(first)
    steps.push(second)
    assert steps.pop(SchedulerOutput.make_empty()) is None
    assert steps.pop(second.output) is second
    assert steps.pop(first.output) is first
    assert len(steps) == 0


def test_stale_and_dropped_marks() -> None:
    steps = InFlightSteps()
    first, second = step(1, "a", "b", partial=("b",)), step(2, "a", "b")
    steps.push(first)
    steps.push(second)
    assert steps.make_stale("b") == 1
    assert steps.make_stale("a") == 2
    assert first.stale == {"a", "b"}
    steps.drop_stale("a")
    assert first.dropped == {"a"}
    steps.drop_request("b")
    assert first.stale == second.stale == set()
    assert second.dropped == {"a", "b"}
    assert steps.make_stale("b") == 0
    assert steps.has_tokens()
    assert steps.partial_prefills(first.output) == {"b"}


def test_departed_tables_are_kept_until_the_steps_of_their_time_are_processed() -> None:
    steps = InFlightSteps()
    use = BlockUse("a", 4, {7: (0, 4), 8: (4, 8)})
    steps.add_departed(use)
    assert steps.departed_since(0) == []
    steps.push(step(1, "a"))
    steps.push(step(2, "a"))
    steps.add_departed(use)
    assert steps.departed_since(1) == [use]
    assert steps.departed_since(3) == []
    steps.forget_departed(1)
    assert steps.departed_since(2) == [use]
    steps.forget_departed(2)
    assert steps.departed_since(1) == []
    assert use.blocks_after(4) == {8}
    assert use.first_in({8}) == 4
    assert use.first_in({9}) is None
