"""Where a request whose load has failed goes on, and that nobody else notices."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tests.helpers.sched import Driver, expected_output, full, mamba, replayed_window, window
from tests.unit.sched.test_loads import machine, prompt
from vllm.v1.core.sched.output import SchedulerOutput


def watch_starts(driver: Driver) -> dict[str, list[int]]:
    """The computed tokens with which each request goes into its steps, kept up to date."""
    starts: dict[str, list[int]] = defaultdict(list)
    schedule = driver.schedule

    def watched(**how: Any) -> SchedulerOutput:
        output = schedule(**how)
        for new in output.scheduled_new_reqs:
            starts[new.req_id].append(new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            starts[name].append(computed)
        return output

    driver.schedule = watched  # type: ignore[method-assign]
    return starts


@pytest.mark.parametrize(
    ("specs", "good"),
    [
        ([full(4)], 32),
        ([full(8), window(8, 12)], 32),
        ([full(8), mamba(8)], 32),
        ([full(8), full(16)], 32),
        ([full(8), replayed_window(8, 8)], 24),  # the window before 32 is computed again
    ],
)
@pytest.mark.parametrize("load_async", [True, False])
@pytest.mark.parametrize("looks_ahead", [True, False])
def test_only_the_failed_request_rewinds_to_its_last_good_aligned_position(
    specs: list[Any], good: int, load_async: bool, looks_ahead: bool
) -> None:
    """34 tokens are on the device, 64 are offered and do not come; by then the connector has forgotten them."""
    driver, connector, loads = machine(specs, 120, load_async=load_async, looks_ahead=looks_ahead)
    driver.add("seed", prompt(34), max_tokens=1)
    driver.run()
    connector.remember(prompt(64))
    loads.by_block, loads.fail_ids = True, {"fails"}
    others = {
        "decodes": driver.add("decodes", prompt(20, 7), max_tokens=12),
        "shares the good part": driver.add("shares the good part", prompt(33), max_tokens=6),
    }
    driver.step()
    starts = watch_starts(driver)
    fails = driver.add("fails", prompt(70), max_tokens=3)
    while driver.scheduler.has_unfinished_requests():
        if fails.num_load_failures:
            connector.store.clear()
        driver.step()
    assert fails.num_load_failures == 1
    assert good in starts["fails"]
    assert min(starts["fails"]) == good, "nothing before it is computed again"
    for name, request in others.items():
        assert request.num_preemptions == 0
        assert starts[name] == sorted(set(starts[name])), "it never goes back"
    assert driver.outputs["fails"] == expected_output(prompt(70), 3)
    assert driver.outputs["decodes"] == expected_output(prompt(20, 7), 12)
    assert driver.outputs["shares the good part"] == expected_output(prompt(33), 6)
    driver.assert_at_rest()
