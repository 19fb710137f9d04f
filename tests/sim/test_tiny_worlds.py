"""Tiny worlds (few blocks, at most three requests) in which every order of a few actions is tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.sim.checkers import check_all
from tests.sim.checkers_end import check_rest
from tests.sim.driver import Action, drain
from tests.sim.params import Byte, SimParams
from tests.sim.run import Run
from tests.sim.worlds import draw_params
from vllm.v1.kv_cache_interface import FullAttentionSpec

LENGTH = 6
ARRIVALS_MAX = 3
NAMES = ("arrive", "schedule", "execute", "finish", "copy", "abort", "reset")


def tiny(**changes: object) -> SimParams:
    """A world of one full-attention group, 4 device blocks and 3 host blocks beside the null blocks."""
    full = FullAttentionSpec(block_size=2, num_kv_heads=1, head_size=4, dtype=Byte())
    base = replace(
        draw_params(1),
        specs=(full,),
        device_blocks=5,
        host_blocks=4,
        lazy=False,
        disk=False,
        ranks=1,
        async_scheduling=False,
        pipeline_stages=1,
        depth=1,
        max_model_len=8,
        max_num_batched_tokens=8,
        max_num_seqs=2,
        policy="fcfs",
        chunked_prefill=True,
        prefix_caching=True,
        match_unit=None,
        early_loads=False,
        faults=frozenset(),
        actions_off=frozenset({"pause", "cool"}),
    )
    return replace(base, **changes)


def run_actions(params: SimParams, names: tuple[str, ...]) -> Run:
    """Take these actions, then let the run come to rest; checks everything after each."""
    run = Run(params)
    for place, name in enumerate(names):
        run.act(name, place)
        check_all(run)
    drain(run)
    check_rest(run)
    return run


def orders(params: SimParams) -> Iterator[tuple[str, ...]]:
    """All sequences of enabled actions that begin with an arrival, by walking the tree of prefixes."""
    pending: list[tuple[str, ...]] = [("arrive", "schedule")]
    while pending:
        names = pending.pop()
        if len(names) == LENGTH:
            yield names
            continue
        run = Run(params)
        actions: list[Action] = [(name, place) for place, name in enumerate(names)]
        for action in actions:
            run.act(*action)
        for name in NAMES:
            if name not in run.enabled() or (name == "arrive" and names.count("arrive") >= ARRIVALS_MAX):
                continue
            pending.append((*names, name))


WORLDS = {
    "full": {},
    "full, look-ahead": {"async_scheduling": True, "depth": 2},
    "full, lazy": {"lazy": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WORLDS))
def test_every_order_of_few_actions(name: str) -> None:
    params = tiny(**WORLDS[name])
    count = 0
    for names in orders(params):
        run_actions(params, names)
        count += 1
    assert count > 100
