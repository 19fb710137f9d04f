"""Drops actions from a failing run while it goes on failing in the same way, and keeps the short list for ever."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.sim.driver import Action, Result, replay

REGRESSIONS = Path(__file__).parent / "regressions"


def _fails_alike(seed: int, actions: Sequence[Action], code: str) -> bool:
    failure = replay(seed, actions).failure
    return failure is not None and failure.code == code


def shrink(result: Result, tries: int = 400) -> list[Action]:
    """A shorter list of actions that ends in a failure of the same code."""
    assert result.failure is not None
    code = result.failure.code
    actions = list(result.actions)
    size = max(1, len(actions) // 2)
    while size >= 1 and tries > 0:
        start = 0
        while start < len(actions) and tries > 0:
            shorter = actions[:start] + actions[start + size :]
            tries -= 1
            if _fails_alike(result.seed, shorter, code):
                actions = shorter
            else:
                start += size
        size //= 2
    return actions


def save(name: str, seed: int, actions: Sequence[Action], note: str) -> Path:
    """Write a regression; it must pass from now on."""
    path = REGRESSIONS / f"{name}.json"
    path.write_text(json.dumps({"note": note, "seed": seed, "actions": [list(a) for a in actions]}) + "\n")
    return path


def load(path: Path) -> tuple[int, list[Action]]:
    """(seed, actions) of a kept regression."""
    content = json.loads(path.read_text())
    return content["seed"], [(str(name), int(place)) for name, place in content["actions"]]


def shrink_and_save(result: Result) -> Path:
    """Shorten a failing run and keep it."""
    assert result.failure is not None
    actions = shrink(result)
    name = f"{result.failure.code.lower()}_seed_{result.seed}"
    return save(name, result.seed, actions, str(result.failure))
