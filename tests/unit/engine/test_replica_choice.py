"""Which replica a request goes to: exact counts, the pinned one, and the one that was given the same start lately."""

from __future__ import annotations

import pytest

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import replica_choice
from vllm.v1.engine.replica_choice import SPARE_REQUESTS, ReplicaChoice
from vllm.v1.messages import EngineCoreRequest

LONG = list(range(300))


def ask(
    name: str,
    tokens: list[int] | None = None,
    rank: int | None = None,
    salt: str | None = None,
    lora: str = "",
) -> EngineCoreRequest:
    adapter = LoRARequest(lora, 1) if lora else None
    return EngineCoreRequest(name, tokens or [1, 2], None, SamplingParams(), None, 0.0, adapter, salt, rank)


def test_requests_go_where_fewest_are_and_spread_over_idle_replicas() -> None:
    choice = ReplicaChoice(3)
    assert [choice.place(ask(str(number))) for number in range(6)] == [0, 1, 2, 0, 1, 2]
    choice.forget("1")
    choice.forget("1")  # an abort and the end cross: it counts once
    choice.forget("nobody")
    assert choice.loads == [2, 1, 2]
    assert (choice.replica_of("1"), choice.replica_of("2")) == (None, 2)
    assert choice.place(ask("6")) == 1
    for number in range(7):
        choice.forget(str(number))
    assert choice.loads == [0, 0, 0]
    # One after the other: each replica has its turn, so that all caches are used. The second has had one more so far.
    turns = []
    for number in range(3):
        turns.append(choice.place(ask(f"t{number}")))
        choice.forget(f"t{number}")
    assert turns == [0, 2, 0]


def test_a_pinned_request_goes_where_it_asks_for_and_counts_there() -> None:
    choice = ReplicaChoice(2)
    assert [choice.place(ask(str(number), rank=1)) for number in range(3)] == [1, 1, 1]
    assert choice.loads == [0, 3]
    assert [choice.place(ask(f"x{number}")) for number in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_replica_that_is_not_there_is_refused(rank: int) -> None:
    choice = ReplicaChoice(2)
    with pytest.raises(ValueError, match=rf"data_parallel_rank={rank} must be in \[0, 2\)"):
        choice.place(ask("a", rank=rank))
    assert choice.loads == [0, 0]


def test_a_conversation_stays_where_its_start_is_until_that_replica_is_too_busy() -> None:
    choice = ReplicaChoice(2)
    assert choice.place(ask("a", LONG)) == 0
    choice.forget("a")
    assert choice.place(ask("b", [7] * 300)) == 1
    choice.forget("b")
    assert choice.place(ask("c", [7] * 300 + LONG)) == 1
    turns = [choice.place(ask(f"d{number}", LONG + [number] * 90)) for number in range(2 + SPARE_REQUESTS)]
    assert turns == [0] * (2 + SPARE_REQUESTS), "replica 1 has one request"
    assert choice.place(ask("e", LONG)) == 1, "more would be too many"
    assert choice.place(ask("f", LONG)) == 1, "both know it now: the one with fewer has it"


def test_salt_and_adapter_part_what_no_hit_can_join() -> None:
    choice = ReplicaChoice(2)
    assert choice.place(ask("a", LONG)) == 0
    choice.forget("a")
    assert choice.place(ask("b", LONG, salt="s")) == 1
    choice.forget("b")
    assert choice.place(ask("c", LONG, lora="l")) == 0
    choice.forget("c")
    assert choice.place(ask("d", LONG, salt="s")) == 1
    choice.forget("d")
    assert choice.place(ask("e", LONG)) == 0
    assert choice.loads == [1, 0]


def test_short_starts_are_nobodys_and_the_longer_one_wins() -> None:
    choice = ReplicaChoice(2)
    for name, replica in (("a", 0), ("b", 1)):
        assert choice.place(ask(name, LONG[:63])) == replica, "shorter than any start that is remembered"
        choice.forget(name)
    choice.place(ask("c", LONG[:100], rank=0))
    choice.place(ask("d", LONG[:200], rank=1))
    choice.forget("c")
    assert choice.place(ask("e", LONG)) == 1, "though the other one is idle"
    assert choice.place(ask("f", LONG[:100])) == 0, "both know 64 tokens of it"


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_choice, "STARTS_MAX", 3)
    choice = ReplicaChoice(2)
    for number in range(5):
        choice.place(ask(f"a{number}", [number] * 64, rank=1))
        choice.forget(f"a{number}")
    assert [len(starts) for starts in choice._starts] == [0, 3]
    choice.place(ask("b", [0] * 64))
    assert choice.loads == [1, 0], "forgotten, so the one that got fewest"
