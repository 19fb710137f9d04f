"""A real engine, killed while it writes its disk tier, and what the next one makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine_configs import engine_args, prompt_of, tiny_folder
from tests.helpers.faulty_executors import POISON
from tests.helpers.kept_engine import finish, settings
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.message_types import FinishReason
from vllm.v1.simple_kv_offload.copy_backends.kept_table import HEADER_BYTES, RECORD_BYTES

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


def kept_rows(folder: Path) -> int:
    """Records in the index on disk that tell of something."""
    (path,) = folder.glob("*.index")
    data = path.read_bytes()[HEADER_BYTES:]
    return sum(any(data[at : at + RECORD_BYTES]) for at in range(0, len(data), RECORD_BYTES))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_what_an_error_made_suspect_is_off_the_disk_when_the_client_hears_of_it(
    async_scheduling: bool, tmp_path: Path
) -> None:
    arguments = engine_args(
        max_model_len=512,
        max_num_batched_tokens=64,
        async_scheduling=async_scheduling,
        distributed_executor_backend="tests.helpers.faulty_executors.PoisonedExecutor",
        **settings(str(tmp_path / "kv"), "backend"),
    )
    engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
    try:
        engine.add_request("bad", [*prompt_of(450), *POISON], SamplingParams(max_tokens=2))
        core = engine.engine_core.engine_core  # type: ignore[attr-defined]
        ends: list[Any] = []
        before = after = 0
        while not ends:
            time.sleep(0.03)  # for the copies, so that there is something to take back
            before = kept_rows(tmp_path)
            messages, _ = core.step_fn()  # what it returns goes to the clients
            after = kept_rows(tmp_path)
            ends = [out for message in (messages or {}).values() for out in message.outputs if out.finished]
        assert ends[0].finish_reason is FinishReason.ERROR
        assert before > 0
        assert after == 0
    finally:
        engine.shutdown()


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
