"""What is computed of a prompt whose request is aborted can be gone on with, on the device and from below."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.offload_rig import Rig, full, mamba, prompt, window
from vllm.config import SpeculativeConfig

LENGTH = 61
SPECS = {
    "full": [full()],
    "state": [full(), mamba()],
    "wide state": [full(4), mamba(16)],
    "window": [full(), window()],
    "window and state": [full(), window(4, 9), mamba(8)],
}


def rig_of(kind: str, budget: int, **config: Any) -> Rig:
    changes = {"max_num_batched_tokens": budget, "max_num_seqs": 2, **config}
    return Rig(specs=SPECS[kind], device_blocks=96, host_blocks=96, config_changes=changes)


def aligned(kind: str, num_tokens: int) -> int:
    size = max(spec.block_size for spec in SPECS[kind])
    return num_tokens // size * size


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("budget", [8, 13, 24])
def test_off_24_an_aborted_prefill_can_be_gone_on_with(kind: str, budget: int) -> None:
    for steps in range(1, 4):
        rig = rig_of(kind, budget)
        request = rig.add(prompt(LENGTH), max_tokens=2)
        for _ in range(steps):
            rig.step()
        frontier = request.num_computed_tokens
        rig.abort(request)
        rig.run()
        if frontier >= LENGTH - 1:
            continue
        assert rig.generate(prompt(LENGTH), max_tokens=2).num_cached_tokens >= aligned(kind, frontier)
        rig.assert_at_rest()
        below = rig_of(kind, budget)
        request = below.add(prompt(LENGTH), max_tokens=2)
        for _ in range(steps):
            below.step()
        below.abort(request)
        below.run()
        below.evict_device()
        again = below.generate(prompt(LENGTH), max_tokens=2)
        if "state" not in kind or frontier == aligned(
            kind, frontier
        ):  # a state is handed over where it stands
            assert again.num_cached_tokens >= aligned(kind, frontier)
        below.assert_at_rest()


@pytest.mark.parametrize("kind", SPECS)
def test_off_24_only_what_is_confirmed_counts(kind: str) -> None:
    rig = rig_of(kind, 16, looks_ahead=True)
    request = rig.add(prompt(LENGTH), max_tokens=2)
    first = rig.scheduler.schedule()
    second = rig.scheduler.schedule()
    rig.finish_step(first)
    rig.abort(request)  # the second step is still running
    again = rig.add(prompt(LENGTH), max_tokens=2)
    third = rig.scheduler.schedule()
    rig.finish_step(second)
    rig.finish_step(third)
    rig.run()
    rig.check_output(again)
    rig.evict_device()
    rig.generate(prompt(LENGTH), max_tokens=2)
    rig.assert_at_rest()


def test_off_24_with_a_drafter_the_block_before_the_frontier_is_the_end() -> None:
    drafter = SpeculativeConfig(method="mtp", num_speculative_tokens=1)
    rig = rig_of("window", 16, speculative=drafter)
    request = rig.add(prompt(LENGTH), max_tokens=2)
    rig.step()
    rig.step()
    rig.abort(request)
    rig.run()
    assert rig.generate(prompt(LENGTH), max_tokens=1).num_cached_tokens >= request.num_computed_tokens - 8


def test_off_24_an_aborted_request_whose_prompt_is_done_keeps_only_its_ends() -> None:
    rig = rig_of("window", 64)
    request = rig.add(prompt(40), max_tokens=20)
    for _ in range(9):
        rig.step()
    rig.abort(request)
    rig.run()
    assert rig.in_tier(request, group=1) == [7, 8]
