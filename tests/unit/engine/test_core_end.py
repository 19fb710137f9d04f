"""The order in which a core lets go of what it has."""

from __future__ import annotations

import pytest

from vllm.v1.engine.core_loop import EngineCore


class Part:
    def __init__(
        self, name: str, ended: list[str], is_failed: bool = False, error: Exception | None = None
    ) -> None:
        self.name, self.ended, self.is_failed, self.error = name, ended, is_failed, error

    def shutdown(self) -> None:
        self.ended.append(self.name)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("is_failed", "order"),
    [(False, ["scheduler", "workers"]), (True, ["workers", "scheduler"])],
    ids=["workers that end by themselves", "workers that may be ended by force"],
)
def test_who_goes_last_removes_what_was_shared(is_failed: bool, order: list[str]) -> None:
    ended: list[str] = []
    core = EngineCore.__new__(EngineCore)
    core.scheduler = Part("scheduler", ended)  # type: ignore[assignment]
    core.model_executor = Part("workers", ended, is_failed)  # type: ignore[assignment]
    core.shutdown()
    assert ended == order


def test_what_fails_to_end_does_not_keep_the_other() -> None:
    ended: list[str] = []
    core = EngineCore.__new__(EngineCore)
    core.scheduler = Part("scheduler", ended, error=OSError("stuck"))  # type: ignore[assignment]
    core.model_executor = Part("workers", ended)  # type: ignore[assignment]
    with pytest.raises(OSError, match="stuck"):
        core.shutdown()
    assert ended == ["scheduler", "workers"]
