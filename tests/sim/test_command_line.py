"""What `python -m tests.sim` prints of a failure: one line each, whatever the width of the terminal, and the short list."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim import shrink
from tests.sim.__main__ import main
from tests.sim.batch import first_failure
from tests.sim.shrink import load

BUG = "lose an event"


def test_each_failure_is_one_line_with_its_command_below(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "12", "--jobs", "1", "--mutant", BUG]) == 1
    lines = capsys.readouterr().out.splitlines()
    failures = lines[next(i for i, line in enumerate(lines) if line.startswith("I7: ")) + 1 :]
    assert max(map(len, failures)) > 80, "none of them would have been wrapped"
    for failure, command in zip(failures[::2], failures[1::2], strict=True):
        seed = failure.removeprefix("seed ").partition(":")[0]
        assert command == f"    python -m tests.sim --seed {seed} --ticks 300 --mutant '{BUG}'"


def test_a_shortened_failure_is_shown_with_its_own_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shrink, "REGRESSIONS", tmp_path)
    failing = first_failure(range(100), 100, BUG)
    assert failing is not None
    assert main(["--seed", str(failing.seed), "--ticks", "100", "--mutant", BUG, "--shrink"]) == 1
    (path,) = tmp_path.glob("*.json")
    _, actions = load(path)
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("shortened to"))
    assert lines[start].startswith(f"shortened to {len(actions)} actions: [I7] events say ")
    assert lines[start + 1 : -1] == [f"  {place:4} {name}" for name, place in actions]
    assert lines[-1] == f"kept as {path}"
