"""Engines of one pool that have no room in it together come to rest: none copies for ever what the others evict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.offload_rig import full, prompt
from tests.helpers.rank_rig import RankRig
from vllm.v1.simple_kv_offload.admission import CopiedLately
from vllm.v1.simple_kv_offload.copy_backends import shared_host
from vllm.v1.simple_kv_offload.selection import Selection

STEPS = 60
"""Of each engine; they have all done what they had to do by half of them."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_host, "DEFAULT_FOLDER", str(tmp_path))
    return tmp_path


Ends = list[tuple[int, ...]]


ALIKE = replace(full(), max_tp_shards=1)  # type: ignore[call-arg]
KINDS: dict[str, dict[str, Any]] = {
    "one": {},
    "wide": {"specs": [ALIKE, replace(full(), max_tp_shards=None)], "ranks": 2},  # type: ignore[call-arg]
}
"""Blocks of one slot, and beside them some of two."""


def node(engines: int, *, lazy: bool, device_blocks: int, slots: int, kind: str = "one") -> list[RankRig]:
    return [
        RankRig(
            device_blocks=device_blocks,
            host_blocks=slots,
            lazy=lazy,
            engine_id=f"engine{number}",
            **KINDS[kind],
        )
        for number in range(engines)
    ]


def scheduled(rigs: list[RankRig]) -> list[int]:
    """Blocks that each engine has set out to store."""
    return [rig.manager.store_side.ledger.scheduled for rig in rigs]


def run_in_turns(rigs: list[RankRig], ends: Ends) -> Iterator[int]:
    """A step of each engine that has work, over and over; ``ends``: whose copies end then."""
    for step in range(STEPS):
        for rig in rigs:
            if rig.scheduler.has_requests():
                rig.step(copies=False)
        for engine in ends[step % len(ends)]:
            for rank in range(len(rigs[engine].workers)):
                rigs[engine].mover(rank).release()
        yield step


@pytest.mark.parametrize(
    ("kind", "tokens", "slots"),
    [("one", 37, 12), ("wide", 17, 12), ("wide", 17, 11), ("wide", 17, 14), ("wide", 17, 17)],
)
@pytest.mark.parametrize("ends", [[(0, 1)], [(1,), (0,), (0, 1)]])
def test_lazy_engines_without_requests_end_their_copies(
    ends: Ends, kind: str, tokens: int, slots: int
) -> None:
    rigs = node(2, lazy=True, device_blocks=12, slots=slots, kind=kind)
    for seed, rig in enumerate(rigs):
        rig.add(prompt(tokens, seed), max_tokens=2)
    for _ in run_in_turns(rigs, ends):
        pass
    assert [rig.scheduler.has_requests() for rig in rigs] == [False, False], scheduled(rigs)
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("slots", [7, 11])
def test_engines_that_serve_nothing_new_store_nothing_again(slots: int, *, lazy: bool) -> None:
    """Each goes on with a request; what there is to copy does not change but by its new blocks."""
    rigs = node(3, lazy=lazy, device_blocks=40 if lazy else 60, slots=slots)
    for seed, rig in enumerate(rigs):
        rig.generate(prompt(21, seed), max_tokens=1)
        rig.add(prompt(21, 10 + seed), max_tokens=STEPS + 2)
    stored = [scheduled(rigs) for _ in run_in_turns(rigs, [(0, 1, 2)])]
    assert all(rig.scheduler.running for rig in rigs)
    for before, after in zip(stored[STEPS // 2], stored[-1], strict=True):
        # Four tokens make a block. One that has been evicted while its request runs is stored once more.
        new_blocks = STEPS // 2 // 4 + 1
        assert after - before <= (new_blocks if lazy else 2 * new_blocks), stored
    for rig in rigs:
        rig.run()
        rig.close()


def test_a_block_is_copied_again_when_as_many_were_lost_as_are_in_danger() -> None:
    lately = CopiedLately()
    lately.note(["a", "b"], 10)  # type: ignore[list-item]
    lately.note(["c", "a"], 12)  # type: ignore[list-item]

    def among(now: int, limit: int = 9) -> list[str]:
        return sorted(map(str, lately.among({"a", "b", "c", "d"}, now, span=5, limit=limit)))  # type: ignore[arg-type]

    assert among(14) == ["a", "b", "c"]
    assert among(15) == ["a", "c"]
    assert among(16, limit=1) == ["a"], "the latest are remembered"
    assert among(17) == []
    assert len(lately) == 0


def test_a_slot_left_over_of_a_block_of_others_is_no_empty_one_to_a_copy_made_again() -> None:
    """Each of their blocks leaves one when its other slots are taken: such copies would go on for ever."""
    idle, busy = node(2, lazy=False, device_blocks=60, slots=17, kind="wide")
    tier = idle.manager.tier
    with tier.turn:
        assert not Selection(tier).evicts_others(), "all is empty"
    for seed in range(4):
        busy.generate(prompt(21, seed), max_tokens=1)
    assert tier.shared is not None
    with tier.turn:
        assert tier.num_stageable == 16
        while tier.is_of_others(tier.victims().peek()):
            tier.shared.get_blocks_for([None])
        assert tier.victims().peek() is not None
        assert Selection(tier).evicts_others()
    for rig in (idle, busy):
        rig.close()
