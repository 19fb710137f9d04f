"""How requests reach the scheduler of an engine core."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.sched import make_request, make_scheduler
from vllm.v1.engine import core_loop
from vllm.v1.engine.core_loop import EngineCore
from vllm.v1.message_types import FinishReason


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> EngineCore:
    """A core whose model is never run."""
    scheduler = make_scheduler()
    parts = SimpleNamespace(
        executor=SimpleNamespace(max_concurrent_batches=1),
        scheduler=scheduler,
        structured_output_manager=None,
        kv_cache_config=scheduler.kv_cache_config,
        block_hasher=None,
    )
    monkeypatch.setattr(core_loop, "build_engine", lambda *_: parts)
    config: Any = SimpleNamespace(speculative_config=None)
    return EngineCore(config, SimpleNamespace, log_stats=False)  # type: ignore[arg-type]


def add(core: EngineCore, request_id: str, **fields: Any) -> None:
    core.add_request(make_request(core.scheduler, request_id, [1, 2, 3], **fields))  # type: ignore[arg-type]


def test_a_session_takes_its_last_input(core: EngineCore) -> None:
    add(core, "s", resumable=True)
    add(core, "s", resumable=True)
    add(core, "s", resumable=False)
    assert core.scheduler.get_num_unfinished_requests() == 1


def test_an_id_in_use_is_refused(core: EngineCore) -> None:
    add(core, "a")
    for resumable in (False, True):
        with pytest.raises(ValueError, match="'a' is already in use"):
            add(core, "a", resumable=resumable)
    assert core.scheduler.get_num_unfinished_requests() == 1


def test_a_held_back_request_that_cannot_be_used_ends_alone(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    control: Any = SimpleNamespace(is_draining=True, tick=lambda: None)
    monkeypatch.setattr(core, "control", control)
    for request_id in ("a", "a", "b"):
        add(core, request_id)
    core.tick()
    assert not core.scheduler.has_requests()
    control.is_draining = False
    core.tick()
    assert core.scheduler.get_num_unfinished_requests() == 2
    [message] = core.take_side_outputs()
    [output] = message[0].outputs
    assert (output.request_id, output.finish_reason) == ("a", FinishReason.ERROR)
    assert output.error is not None
    assert "already in use" in output.error.message
