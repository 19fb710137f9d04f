"""A real engine, killed while it writes its disk tier, and what the next one makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine_configs import engine_args, prompt_of, tiny_folder
from tests.helpers.kept_engine import finish
from vllm.v1.engine.llm_engine import LLMEngine

NUM_PROMPTS = 14


def child_command(model: str, folder: Path, count: int, *more: str) -> list[str]:
    """An engine in a process of its own."""
    command = ["-m", "tests.helpers.kept_engine", model, str(folder / "kv"), str(count)]
    return [sys.executable, *command, *more]


def run_child(model: str, folder: Path, kill_after: int | None, place: str = "tier") -> list[dict[str, Any]]:
    """What the engine said; it is killed as soon as so many prompts are finished."""
    command = child_command(model, folder, NUM_PROMPTS, place)
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if not line.startswith("DONE "):
                continue
            lines.append(json.loads(line.removeprefix("DONE ")))
            if len(lines) == kill_after:
                os.kill(child.pid, signal.SIGKILL)
                break
    assert child.returncode == (0 if kill_after is None else -signal.SIGKILL)
    return lines


def reference(model: str, block: int) -> list[list[int]]:
    """The outputs of an engine that caches nothing."""
    engine = LLMEngine.from_engine_args(
        engine_args(model=model, max_model_len=512, enable_prefix_caching=False), enable_multiprocessing=False
    )
    try:
        outputs = [finish(engine, f"r{i}", prompt_of(3 * block + 5, i)) for i in range(NUM_PROMPTS)]
    finally:
        engine.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


def reset_and_die(model: str, folder: Path, place: str) -> tuple[int, str]:
    """An engine that does nothing but reset its caches: the blocks that it had found on disk, and its answer."""
    command = child_command(model, folder, 0, place, "reset")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        words = dict(line.split(maxsplit=1) for line in child.stdout if line.startswith(("HELD ", "RESET ")))
    assert child.returncode == -signal.SIGKILL
    return int(words["HELD"]), words["RESET"].strip()


@pytest.mark.parametrize("place", ["tier", "backend"])
def test_pfx_14_a_reset_stays_true_after_sigkill_right_behind_its_answer(place: str, tmp_path: Path) -> None:
    model = str(tiny_folder("llama"))
    run_child(model, tmp_path, kill_after=5, place=place)
    found, answer = reset_and_die(model, tmp_path, place)
    assert found > 0
    assert answer == "True"
    again = run_child(model, tmp_path, kill_after=5, place=place)
    assert [line["cached"] for line in again] == [0] * 5


@pytest.mark.parametrize(("name", "place"), [("llama", "tier"), ("llama", "backend"), ("glm5_next", "tier")])
def test_tier_11_after_sigkill_in_the_middle_of_writes_hits_are_right(
    name: str, place: str, tmp_path: Path
) -> None:
    model = str(tiny_folder(name))
    first = run_child(model, tmp_path, kill_after=5, place=place)
    assert [line["cached"] for line in first] == [0] * 5
    second = run_child(model, tmp_path, kill_after=10, place=place)
    third = run_child(model, tmp_path, kill_after=None, place=place)
    block = third[0]["block"]
    expected = reference(model, block)
    for lines in (first, second, third):
        assert [line["tokens"] for line in lines] == expected[: len(lines)]
    # The last prompts before a kill may not have got as far as the disk.
    assert [line["cached"] for line in second[:3]] == [3 * block] * 3
    assert [line["cached"] for line in third[:8]] == [3 * block] * 8
    assert third[-1]["cached"] == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2
    assert names[1] == f"{names[0]}.index"
