"""The asyncio client over several cores: what goes to which, what their answers are as one, and the end of one of them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.engine_configs import engine_config
from tests.helpers.fake_cores import NO_PID, FakeCores
from vllm.config import ParallelConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_core_client import AsyncMPClient
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError, UtilityRefusedError
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

pytestmark = pytest.mark.asyncio
Start = Callable[..., AsyncMPClient]


def config_of(replicas: int) -> VllmConfig:
    return VllmConfig(parallel_config=ParallelConfig(data_parallel_size=replicas))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCores]:
    fakes = FakeCores(monkeypatch)
    yield fakes
    fakes.close()


@pytest.fixture
def start(fakes: FakeCores) -> Iterator[Start]:
    clients: list[AsyncMPClient] = []

    def begin(replicas: int = 2) -> AsyncMPClient:
        clients.append(AsyncMPClient(config_of(replicas), UniProcExecutor, False))
        return clients[-1]

    yield begin
    for client in clients:
        client.shutdown(timeout=1.0)


def ask(name: str, rank: int | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(name, [1, 2], None, SamplingParams(), None, 0.0, None, None, rank)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def test_requests_aborts_and_ends_find_their_core(fakes: FakeCores, start: Start) -> None:
    client = start()
    for number in range(4):
        await client.add_request_async(ask(f"r{number}"))
    await client.add_request_async(ask("pinned", rank=1))
    first, second = fakes.cores
    await until(lambda: len(first.requests) + len(second.requests) == 5)
    assert first.requests == ["r0", "r2"]
    assert second.requests == ["r1", "r3", "pinned"]
    client.abort_requests_now(["r3", "r0", "nobody"])
    await until(lambda: bool(first.aborts and second.aborts))
    assert (first.aborts, second.aborts) == (["r0"], ["r3"])
    second.send(EngineCoreOutputs(outputs=[EngineCoreOutput("r1", [5], finish_reason=FinishReason.STOP)]))
    output = await client.get_output_async()
    assert (output.engine_index, [item.request_id for item in output.outputs]) == (1, ["r1"])
    await client.add_request_async(ask("next"))  # each has one now; the second was given more so far
    await until(lambda: "next" in first.requests)
    client.abort_requests_now(["r1"])  # has ended: nobody is told
    with pytest.raises(ValueError, match=r"data_parallel_rank=2 must be in \[0, 2\)"):
        await client.add_request_async(ask("wrong", rank=2))
    await client.call_utility_async("check_health")
    assert second.aborts == ["r3"]


async def test_answers_of_all_cores_are_one_answer(fakes: FakeCores, start: Start) -> None:
    answers: dict[str, Any] = {
        "is_sleeping": [True, False],
        "add_lora": [True, True],
        "collective_rpc": [["a", "b"], ["c", "d"]],
        "list_loras": [[1], [1, 2]],
        "get_supported_tasks": [["generate"], ["generate"]],
        "get_kv_cache_group_metadata": [[{"group_idx": 0}], [{"group_idx": 0}]],
        "get_weight_version": ["v", "v"],
        "reset_mm_cache": [None, None],
    }
    fakes.answer = lambda core, method, _: answers[method][core]
    client = start()
    told = {method: await client.call_utility_async(method) for method in answers}
    assert told == {
        "is_sleeping": False,
        "add_lora": True,
        "collective_rpc": ["a", "b", "c", "d"],
        "list_loras": [1, 1, 2],
        "get_supported_tasks": ["generate"],
        "get_kv_cache_group_metadata": [{"group_idx": 0}],
        "get_weight_version": "v",
        "reset_mm_cache": None,
    }
    assert await client.call_each_async("get_weight_version") == ["v", "v"]


async def test_a_failure_names_its_core_when_all_have_answered(fakes: FakeCores, start: Start) -> None:
    asked: list[int] = []

    def answer(core: int, method: str, args: tuple[Any, ...]) -> None:
        if core == 0 and method == "slow":
            time.sleep(0.1)
        asked.append(core)
        if method == "refused" or core in args:
            raise ValueError(f"cannot {method}" + (f" at {core}" if args == (0, 1) else ""))
        if method == "slow" and core == 1:
            raise OSError("no space")

    fakes.answer = answer
    client = start()
    with pytest.raises(UtilityRefusedError, match="^cannot refused$"):
        await client.call_utility_async("refused")
    asked.clear()
    with pytest.raises(RuntimeError, match="^engine 1: OSError: no space$") as failure:
        await client.call_utility_async("slow")
    assert asked == [1, 0], "the other one was waited for"
    assert not isinstance(failure.value, UtilityRefusedError)
    with pytest.raises(RuntimeError, match="^engine 0: cannot pause$") as failure:
        await client.call_utility_async("pause", 0)
    assert not isinstance(failure.value, UtilityRefusedError), "the other one has done it"
    with pytest.raises(
        UtilityRefusedError, match="^engine 0: cannot pause at 0; engine 1: cannot pause at 1$"
    ):
        await client.call_utility_async("pause", 0, 1)


async def test_one_core_alone_is_told_of_as_ever(fakes: FakeCores, start: Start) -> None:
    def answer(core: int, method: str, args: tuple[Any, ...]) -> Any:
        if method == "fail":
            raise OSError("no space")
        return [["a"], ["b"]]

    fakes.answer = answer
    client = start(replicas=1)
    assert await client.call_utility_async("collective_rpc") == [["a"], ["b"]]
    with pytest.raises(RuntimeError, match="^OSError: no space$"):
        await client.call_utility_async("fail")


async def test_the_end_of_one_core_is_the_end_of_all(fakes: FakeCores, start: Start) -> None:
    fakes.grace_s = 0.2
    fakes.answer = lambda core, method, _: time.sleep(0.5) if core == 0 else None
    client = start(replicas=3)
    await client.add_request_async(ask("r0"))
    fakes.processes[2].is_deaf = True
    waiting = asyncio.ensure_future(client.call_utility_async("check_health"))
    await until(lambda: fakes.cores[0].requests == ["r0"])
    fakes.processes[1].die(-9)
    told = f"Engine core process {NO_PID + 1} of replica 1 ended unexpectedly with status -9"
    with pytest.raises(EngineDeadError, match=told):
        await client.get_output_async()
    with pytest.raises(EngineDeadError, match=told):
        await waiting
    with pytest.raises(EngineDeadError, match=told):
        await client.add_request_async(ask("r1"))
    assert str(client.dead_error).count("replica") == 1
    await until(lambda: all(process.wait(0) is not None for process in fakes.processes))
    assert [process.status for process in fakes.processes] == [0, -9, -9], "asked, dead, killed"


async def test_a_core_that_has_closed_its_socket_is_gone_for_who_calls(
    fakes: FakeCores, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    fakes.answer = lambda core, method, _: time.sleep(0.3) if core == 0 else None
    client = start()
    for number in range(2):
        await client.add_request_async(ask(f"r{number}"))
    await until(lambda: fakes.cores[1].requests == ["r1"])
    fakes.cores[1].has_left = True
    fakes.cores[1].join(5)
    told = None
    while told is None:
        try:
            await asyncio.wait_for(client.call_utility_async("check_health"), 0.1)
        except TimeoutError:
            continue  # it is not known yet
        except EngineDeadError as error:
            told = str(error)
    assert "An engine core has ended" in told
    client.abort_requests_now(["r1"])
    fakes.processes[1].die(0)
    with pytest.raises(EngineDeadError, match="replica 1 ended"):
        await client.get_output_async()
    await asyncio.sleep(0.05)
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_client_that_ends_leaves_its_loop_to_the_next(
    fakes: FakeCores, start: Start, elsewhere: bool
) -> None:
    """A descriptor that stays with the loop is not watched again when its number is."""
    loop = asyncio.get_running_loop()
    descriptors = set()
    for _ in range(5):
        client = start()
        descriptor = client._connection.output.FD
        descriptors.add(descriptor)
        await asyncio.wait_for(client.call_utility_async("check_health"), 5)
        if elsewhere:
            await asyncio.to_thread(client.shutdown, 1.0)
        else:
            client.shutdown(timeout=1.0)
        assert not loop.remove_reader(descriptor)
        fakes.close()
        fakes.cores.clear()
    assert len(descriptors) < 5, "the kernel gives numbers out again"


async def test_outputs_that_come_in_a_crowd_are_all_read(fakes: FakeCores, start: Start) -> None:
    client = start()
    await client.call_utility_async("check_health")
    for number in range(500):
        fakes.cores[number % 2].send(EngineCoreOutputs(outputs=[EngineCoreOutput(str(number), [1])]))
    got = [await asyncio.wait_for(client.get_output_async(), 5) for _ in range(500)]
    assert {output.outputs[0].request_id for output in got} == {str(number) for number in range(500)}


async def test_a_length_that_all_cores_can_serve(fakes: FakeCores) -> None:
    fakes.lengths = [80, 48]
    config = engine_config(data_parallel_size=2)
    assert config.model_config is not None
    client = AsyncMPClient(config, UniProcExecutor, False)
    assert config.model_config.max_model_len == 48
    assert config.cache_config.num_gpu_blocks == 8, "what both have"
    assert [ready.max_model_len for ready in client.readies] == [80, 48]
    assert client.resolved == [{"num_gpu_blocks": 9}, {"num_gpu_blocks": 8}]
    client.shutdown(timeout=1.0)


@pytest.mark.parametrize("multiprocess", [False, True])
async def test_a_synchronous_front_end_has_one_core(multiprocess: bool) -> None:
    with pytest.raises(ValueError, match="data_parallel_size=2 needs the asyncio engine .* for each replica"):
        EngineCoreClient.make_client(multiprocess, False, config_of(2), UniProcExecutor, False)
