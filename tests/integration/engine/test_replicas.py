"""Two replicas behind one asyncio engine: the answers of one engine, spread, pinned, asked and ended together."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import zmq
from prometheus_client import REGISTRY

from examples.serving import free_port
from tests.helpers.engine_configs import async_engine_args, engine_args, offload_settings, prompt_of
from vllm.distributed.kv_event_types import EventCodec
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineStartError
from vllm.v1.engine.llm_engine import LLMEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)
ENDLESS = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
PROMPTS = [prompt_of(length, length) for length in (100, 37, 80, 64, 51, 96)]


def start(**settings: Any) -> AsyncLLM:
    return AsyncLLM.from_engine_args(async_engine_args(data_parallel_size=2, **settings))


async def ask(
    engine: AsyncLLM,
    prompt: list[int],
    rank: int | None = None,
    name: str = "r",
    params: SamplingParams = GREEDY,
) -> RequestOutput:
    outputs = engine.generate({"prompt_token_ids": prompt}, params, name, data_parallel_rank=rank)
    return [output async for output in outputs][-1]


def answer(output: RequestOutput) -> tuple[list[int], Any]:
    """Tokens and log probabilities."""
    said = output.outputs[0]
    assert said.logprobs is not None
    return list(said.token_ids), [
        {token: entry.logprob for token, entry in place.items()} for place in said.logprobs
    ]


def pids_of(engine: AsyncLLM) -> list[int]:
    return [process.pid for process in engine.engine_core._connection.cores.processes]


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def cores_of_this_process() -> set[int]:
    children = psutil.Process().children()
    return {child.pid for child in children if "vllm.v1.engine.core_main" in child.cmdline()}


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def figure(name: str, rank: int) -> float:
    labels = {"engine": str(rank), "model_name": async_engine_args().model}
    return REGISTRY.get_sample_value(f"vllm:{name}", labels) or 0.0


@pytest.fixture(scope="module")
def alone() -> list[tuple[list[int], Any]]:
    """What one cold engine answers, one prompt after the other."""
    engine = LLMEngine.from_engine_args(engine_args(), enable_multiprocessing=True)
    answers = []
    for prompt in PROMPTS:
        engine.add_request("r", {"prompt_token_ids": prompt}, GREEDY)
        while engine.has_unfinished_requests():
            done = [output for output in engine.step() if output.finished]
        answers.append(answer(done[0]))  # type: ignore[arg-type]
        assert engine.reset_prefix_cache()
    engine.shutdown()
    return answers


class Listener:
    """Subscribed to the events of both replicas."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.context = zmq.Context()
        self.sockets = [self.context.socket(zmq.SUB) for _ in range(2)]
        for rank, socket in enumerate(self.sockets):
            socket.subscribe(b"")
            socket.connect(f"tcp://127.0.0.1:{port + rank}")

    async def ranks_and_hashes(self) -> list[tuple[set[int | None], set[Any]]]:
        """What came on each port since the last time: the ranks in the batches, the hashes stored on the device."""
        await asyncio.sleep(0.3)
        found = []
        for socket in self.sockets:
            ranks: set[int | None] = set()
            hashes: set[Any] = set()
            while socket.poll(0):
                batch = EventCodec().decode(socket.recv_multipart()[-1])
                ranks.add(batch.data_parallel_rank)
                for event in batch.events:
                    if getattr(event, "medium", None) == "GPU":
                        hashes.update(getattr(event, "block_hashes", ()))
            found.append((ranks, hashes))
        return found


def free_ports() -> int:
    """A port that is free, and the next one too."""
    while True:
        port = free_port()
        with zmq.Context() as context, context.socket(zmq.REP) as probe:
            try:
                probe.bind(f"tcp://127.0.0.1:{port + 1}")
            except zmq.ZMQError:
                continue
            return port


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    listener = Listener(free_ports())
    yield listener
    listener.context.destroy(linger=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(listener: Listener, alone: list[Any]) -> AsyncIterator[AsyncLLM]:
    """Private pools, and events. The last engine of a process has the metrics: the lone one comes first."""
    endpoint = f"tcp://*:{listener.port}"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    engine = start(kv_events_config=events, **offload_settings())
    pids = pids_of(engine)
    folder = engine.engine_core._connection.cores.folder
    yield engine
    engine.shutdown()
    assert gone(pids)
    assert not folder.exists()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: AsyncLLM) -> AsyncIterator[AsyncLLM]:
    """Empty caches before; afterwards no request is left."""
    assert await shared.reset_prefix_cache(reset_connector=True)
    yield shared
    await until(lambda: shared.engine_core._choice.loads == [0, 0])
    assert not shared.output_processor.request_states


async def test_the_answers_are_those_of_one_engine_whichever_replica_gives_them(
    engine: AsyncLLM, alone: list[Any]
) -> None:
    for rank in (0, 1):
        cold = [answer(await ask(engine, prompt, rank)) for prompt in PROMPTS]
        assert cold == alone
        again = [await ask(engine, prompt, rank) for prompt in PROMPTS]
        assert [answer(output) for output in again] == alone
        assert all(output.num_cached_tokens for output in again)
    assert await engine.reset_prefix_cache()
    for rank in (0, 1):  # from the replica's own host pool
        loaded = [await ask(engine, prompt, rank) for prompt in PROMPTS]
        assert [answer(output) for output in loaded] == alone
        assert all(output.num_cached_tokens for output in loaded)


async def test_requests_spread_and_are_counted_where_they_run(engine: AsyncLLM, alone: list[Any]) -> None:
    before = [figure("prompt_tokens_total", rank) for rank in (0, 1)]
    placed = list(engine.engine_core._choice.placed)
    outputs = await asyncio.gather(*(ask(engine, prompt, name=str(i)) for i, prompt in enumerate(PROMPTS)))
    assert [answer(output)[0] for output in outputs] == [tokens for tokens, _ in alone]
    shares = [now - was for now, was in zip(engine.engine_core._choice.placed, placed, strict=True)]
    assert shares == [3, 3]
    counted = [figure("prompt_tokens_total", rank) - before[rank] for rank in (0, 1)]
    assert sum(counted) == sum(map(len, PROMPTS))
    assert all(counted)
    # A prompt goes back to where its start was computed.
    continued = [output.prompt_token_ids + list(output.outputs[0].token_ids) for output in outputs]  # type: ignore[operator]
    long = [prompt for prompt in continued if len(prompt) > 100]
    assert [(await ask(engine, prompt)).num_cached_tokens for prompt in long] == [96] * len(long)


async def test_a_rank_pins_and_one_that_is_not_there_is_refused(engine: AsyncLLM) -> None:
    placed = list(engine.engine_core._choice.placed)
    await asyncio.gather(*(ask(engine, PROMPTS[0], 1, str(number)) for number in range(3)))
    assert engine.engine_core._choice.placed == [placed[0], placed[1] + 3]
    for rank in (-1, 2):
        with pytest.raises(VLLMValidationError, match=rf"data_parallel_rank must be in \[0, 2\), got {rank}"):
            await ask(engine, PROMPTS[0], rank)


async def test_aborts_reach_the_replica_that_runs_the_request(engine: AsyncLLM) -> None:
    running = [
        asyncio.ensure_future(ask(engine, PROMPTS[rank], rank, f"r{rank}", ENDLESS)) for rank in (0, 1)
    ]
    await until(lambda: engine.engine_core._choice.loads == [1, 1])
    await engine.abort("r1")
    assert (await running[1]).outputs[0].finish_reason == "abort"
    answers = (await engine.reset_prefix_cache_detailed())["engines"]  # reaches the cores behind the abort
    assert answers[1]["requests_running"] == 0
    assert (await running[0]).outputs[0].finish_reason == "length", "the other one runs to its end"


async def test_all_replicas_answer_what_the_engine_is_asked(engine: AsyncLLM) -> None:
    prompt = PROMPTS[0]
    await ask(engine, prompt, rank=1)
    found = await engine.lookup_kv_cache({"prompt_token_ids": prompt})
    assert [entry["cached_tokens"] for entry in found if entry] == [0, 96]
    reports = await engine.get_kv_cache_reports()
    admitted = [report["requests"]["admitted"] for report in reports if report]
    assert len(admitted) == 2
    assert [group["group_idx"] for group in await engine.get_kv_cache_group_metadata()] == [0]
    assert await engine.get_supported_tasks() == ("generate",)
    assert await engine.collective_rpc("check_health") == [None, None]
    told = await engine.reset_prefix_cache_detailed(tiers=["device"])
    dropped = [each["tiers"][0]["blocks_dropped"] for each in told["engines"]]
    assert dropped[0] == 0
    assert dropped[1] >= 6
    assert (told["success"], told["tiers"][0]["blocks_dropped"]) == (True, sum(dropped))
    await engine.sleep(1)
    assert await engine.is_sleeping()
    assert await engine.is_paused()
    await engine.wake_up()
    assert not await engine.is_sleeping()
    assert not await engine.is_paused()
    await engine.pause_generation("keep", clear_cache=False)
    waiting = [asyncio.ensure_future(ask(engine, prompt, rank, f"r{rank}")) for rank in (0, 1)]
    await asyncio.sleep(0.2)
    assert not any(task.done() for task in waiting)
    await engine.resume_generation()
    first, second = await asyncio.gather(*waiting)
    assert answer(first) == answer(second)


async def test_evt_09_each_replica_tells_its_events_on_a_port_of_its_own(
    engine: AsyncLLM, listener: Listener
) -> None:
    sources = await engine.get_kv_event_sources()
    assert [sources[rank]["endpoint"] for rank in ("0", "1")] == [
        f"tcp://*:{listener.port + rank}" for rank in (0, 1)
    ]
    await listener.ranks_and_hashes()
    await ask(engine, PROMPTS[0], rank=0)
    (ranks, first), (_, nothing) = await listener.ranks_and_hashes()
    assert ranks == {0}
    assert not nothing
    await ask(engine, PROMPTS[0], rank=1)
    (_, nothing), (ranks, second) = await listener.ranks_and_hashes()
    assert ranks == {1}
    assert not nothing
    assert first == second, "the same content has the same hashes"
    assert len(first) == 6


@pytest.fixture
def pool() -> Iterator[str]:
    name = f"replicas-{os.getpid()}"
    yield name
    for path in segments(name):
        path.unlink()


def segments(pool: str) -> list[Path]:
    return sorted(Path("/dev/shm").glob(f"vllm-kv-*-{pool}-*"))


async def test_replicas_of_one_pool_load_what_the_others_stored_and_end_together(
    pool: str, alone: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    settings = offload_settings()
    settings["kv_transfer_config"]["kv_connector_extra_config"]["shared_pool"] = pool
    engine = start(**settings)
    pids, folder = pids_of(engine), engine.engine_core._connection.cores.folder
    assert len(segments(pool)) == 1
    fresh = [await ask(engine, prompt, 0) for prompt in PROMPTS]
    assert [output.num_cached_tokens for output in fresh] == [0] * len(PROMPTS)
    num_blocks = sum(len(prompt + [0] * 7) // 16 for prompt in PROMPTS)
    await asyncio.sleep(0.5)  # the idle core collects its copies
    found = await engine.lookup_kv_cache({"prompt_token_ids": PROMPTS[0]})
    assert [entry["tokens_by_tier"] for entry in found if entry] == [
        {"device": 96, "host": 96},
        {"device": 0, "host": 96},
    ]
    loaded = [await ask(engine, prompt, 1) for prompt in PROMPTS]
    assert [output.num_cached_tokens for output in loaded] == [(len(p) - 1) // 16 * 16 for p in PROMPTS]
    assert [answer(output) for output in [*fresh, *loaded]] == alone * 2

    told = await engine.reset_prefix_cache_detailed(reset_connector=True)
    host = next(tier for tier in told["tiers"] if tier["tier"] == "host")
    assert (told["success"], host["blocks_dropped"]) == (True, num_blocks), (
        "of the one pool, not of each view"
    )
    assert (await ask(engine, PROMPTS[0], 0)).num_cached_tokens == 0

    running = [asyncio.ensure_future(ask(engine, PROMPTS[i], i, f"r{i}", ENDLESS)) for i in (0, 1)]
    await until(lambda: engine.engine_core._choice.loads == [1, 1])
    os.kill(pids[1], signal.SIGKILL)
    for task in running:
        with pytest.raises(EngineDeadError):
            await task
    assert f"{pids[1]} of replica 1 ended unexpectedly with status -9" in str(engine.dead_error)
    assert engine.errored
    with pytest.raises(EngineDeadError):
        await ask(engine, PROMPTS[0])
    await until(lambda: gone([pids[0]]))
    engine.shutdown()
    assert gone(pids)
    assert not folder.exists()
    assert not segments(pool), "the last to leave in order removes it"


async def test_what_a_replica_cannot_start_with_is_told_once_and_ends_all() -> None:
    before = cores_of_this_process()
    with pytest.raises(EngineStartError, match=r"of replica [01] could not start: .*kv_cache_memory_bytes"):
        start(kv_cache_memory_bytes=1 << 10)
    assert cores_of_this_process() == before


@pytest.mark.slow
async def test_each_replica_may_have_several_ranks(alone: list[Any]) -> None:
    engine = start(tensor_parallel_size=2)
    assert await engine.collective_rpc("check_health") == [None] * 4
    workers = [child.pid for pid in pids_of(engine) for child in psutil.Process(pid).children()]
    assert len(workers) == 4
    first, second = [[await ask(engine, prompt, rank) for prompt in PROMPTS[:3]] for rank in (0, 1)]
    assert [answer(output) for output in first] == [answer(output) for output in second]
    assert [answer(output)[0] for output in first] == [tokens for tokens, _ in alone[:3]]
    os.kill(workers[3], signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await ask(engine, PROMPTS[0], 1, params=ENDLESS)
    engine.shutdown()
    assert gone(workers)
