"""Outputs of the core become outputs of requests; no entry outlives its request."""

import asyncio
import traceback
from typing import Any

import numpy as np
import pytest

from tests.helpers.tiny_tokenizers import make_tokenizer
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestError, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.output_processor import (
    OutputProcessor,
    RequestOutputCollector,
    StreamingInputOutputCollector,
)
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.stats import IterationStats, PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

TOKENIZER = make_tokenizer("byte_level")
DELTA, CUMULATIVE, FINAL = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY


def make_request(request_id: str = "r", **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=TOKENIZER.encode("hello "),
        mm_features=None,
        sampling_params=SamplingParams(**params),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=f"ext-{request_id}",
    )


def processor(log_stats: bool = False, stream_interval: int = 1) -> OutputProcessor:
    return OutputProcessor(TOKENIZER, log_stats=log_stats, stream_interval=stream_interval)


def out(
    request_id: str, text: str | list[int], finish: FinishReason | None = None, **more: Any
) -> EngineCoreOutput:
    ids = TOKENIZER.encode(text) if isinstance(text, str) else text
    return EngineCoreOutput(request_id, ids, finish_reason=finish, **more)


def outputs_of(made: Any) -> list[RequestOutput]:
    return made.request_outputs


def assert_empty(proc: OutputProcessor) -> None:
    assert not proc.request_states
    assert not proc.parent_requests
    assert not proc.external_req_ids
    assert not proc.has_unfinished_requests()


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE, FINAL])
def test_kinds_of_output(kind: RequestOutputKind) -> None:
    proc = processor()
    proc.add_request(make_request(output_kind=kind), "hello ")
    pieces = ["foo", " bar", " baz"]
    seen = []
    for piece in pieces[:-1]:
        seen += outputs_of(proc.process_outputs([out("r", piece)]))
    seen += outputs_of(proc.process_outputs([out("r", pieces[-1], FinishReason.LENGTH)]))
    texts = [output.outputs[0].text for output in seen]
    tokens = [list(output.outputs[0].token_ids) for output in seen]
    everything = [i for piece in pieces for i in TOKENIZER.encode(piece)]
    if kind == DELTA:
        assert texts == pieces
        assert [i for ids in tokens for i in ids] == everything
    elif kind == CUMULATIVE:
        assert texts == ["foo", "foo bar", "foo bar baz"]
        assert tokens[-1] == everything
    else:
        assert texts == ["foo bar baz"]
    last = seen[-1]
    assert last.finished
    assert last.request_id == "ext-r"
    assert last.outputs[0].finish_reason == "length"
    assert last.prompt == "hello "
    assert [output.finished for output in seen[:-1]] == [False] * (len(seen) - 1)
    assert_empty(proc)


@pytest.mark.parametrize("kind", [DELTA, FINAL])
def test_stop_string_ends_here_and_aborts_there(kind: RequestOutputKind) -> None:
    proc = processor()
    proc.add_request(make_request(output_kind=kind, stop=["END"]), None)
    first = proc.process_outputs([out("r", "fooE")])
    made = proc.process_outputs([out("r", "ND bar")])
    assert made.reqs_to_abort == ["r"]
    completion = outputs_of(made)[0].outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "END")
    assert "".join(o.outputs[0].text for o in [*outputs_of(first), *outputs_of(made)]) == "foo"
    assert_empty(proc)
    assert not outputs_of(proc.process_outputs([out("r", "late")]))


def test_a_stop_string_in_the_last_output_needs_no_abort() -> None:
    proc = processor()
    proc.add_request(make_request(stop=["END"]), None)
    made = proc.process_outputs([out("r", "aEND", FinishReason.LENGTH)])
    assert made.reqs_to_abort == []
    assert outputs_of(made)[0].outputs[0].finish_reason == "stop"


def test_stop_token_is_reported_but_not_shown() -> None:
    proc = processor()
    proc.add_request(make_request(), None)
    eos = TOKENIZER.eos_token_id
    made = proc.process_outputs(
        [out("r", [*TOKENIZER.encode("ab"), eos], FinishReason.STOP, stop_reason=eos)]
    )
    completion = outputs_of(made)[0].outputs[0]
    assert completion.text == "ab"
    assert completion.token_ids[-1] == eos
    assert completion.stop_reason == eos


def test_stream_interval_groups_tokens_but_not_the_first_or_last() -> None:
    proc = processor(stream_interval=3)
    proc.add_request(make_request(output_kind=DELTA), None)
    ids = list(range(40, 50))
    sizes = []
    for position, token_id in enumerate(ids):
        finish = FinishReason.LENGTH if position == len(ids) - 1 else None
        sizes += [
            len(o.outputs[0].token_ids)
            for o in outputs_of(proc.process_outputs([out("r", [token_id], finish)]))
        ]
    assert sizes == [1, 3, 3, 3]


def test_cached_tokens_are_known_from_the_first_output_on() -> None:
    proc = processor()
    proc.add_request(make_request(output_kind=DELTA), None)
    stats = PrefillStats()
    stats.set(20, 8, 4)
    first = outputs_of(proc.process_outputs([out("r", [40], prefill_stats=stats)]))[0]
    second = outputs_of(
        proc.process_outputs([out("r", [41], FinishReason.LENGTH, kv_transfer_params={"a": 1})])
    )[0]
    assert first.num_cached_tokens == second.num_cached_tokens == 12
    assert first.kv_transfer_params is None
    assert second.kv_transfer_params == {"a": 1}


def test_error_of_one_request_reaches_its_reader_only() -> None:
    proc = processor()
    queues = {name: RequestOutputCollector(DELTA, name) for name in "ab"}
    for name, queue in queues.items():
        proc.add_request(make_request(name, output_kind=DELTA), None, queue=queue)
    error = RequestError("invalid_grammar", "bad grammar")
    proc.process_outputs([out("a", [], FinishReason.ERROR, error=error), out("b", "x")])
    with pytest.raises(VLLMValidationError, match="bad grammar"):
        queues["a"].get_nowait()
    assert queues["b"].get_nowait().outputs[0].text == "x"
    assert list(proc.request_states) == ["b"]


def test_an_error_for_many_readers_does_not_grow_from_one_to_the_next() -> None:
    def fail() -> None:
        raise RuntimeError("the engine is dead")

    with pytest.raises(RuntimeError) as caught:
        fail()
    lengths = set()
    queues = [RequestOutputCollector(DELTA, name) for name in "abc"]
    for queue in queues:
        queue.put(caught.value)
    for queue in queues:
        with pytest.raises(RuntimeError, match="dead") as raised:
            queue.get_nowait()
        frames = traceback.extract_tb(raised.value.__traceback__)
        lengths.add(len(frames))
        assert frames[-1].name == "fail", "where it came from is still told"
    assert len(lengths) == 1


def test_without_a_queue_an_error_is_a_finish_reason() -> None:
    proc = processor()
    proc.add_request(make_request(), None)
    made = proc.process_outputs([out("r", [], FinishReason.ERROR, error=RequestError("step_failed", "boom"))])
    completion = outputs_of(made)[0].outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("error", "boom")
    assert_empty(proc)


def test_a_defect_in_one_output_ends_that_request_only() -> None:
    proc = processor()
    queue = RequestOutputCollector(DELTA, "a")
    proc.add_request(make_request("a", logprobs=1), None, queue=queue)
    proc.add_request(make_request("b", output_kind=DELTA), None)
    broken: Any = LogprobsLists(None, None, None)  # type: ignore[arg-type]
    made = proc.process_outputs([out("a", "x", new_logprobs=broken), out("b", "y")])
    assert made.reqs_to_abort == ["a"]
    assert outputs_of(made)[0].outputs[0].text == "y"
    with pytest.raises(TypeError):
        queue.get_nowait()
    assert list(proc.request_states) == ["b"]


def test_a_broken_output_of_a_request_without_a_queue_ends_it_with_an_error() -> None:
    proc = processor()
    proc.add_request(make_request("a", logprobs=1, output_kind=FINAL), None)
    broken: Any = LogprobsLists(None, None, None)  # type: ignore[arg-type]
    made = outputs_of(proc.process_outputs([out("a", "x", new_logprobs=broken)]))[0]
    assert made.finished
    assert made.outputs[0].finish_reason == "error"
    assert "TypeError" in str(made.outputs[0].stop_reason)
    assert not proc.request_states


def test_an_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    proc = processor()
    proc.add_request(make_request(), None)
    with pytest.raises(ValueError, match="'r' is in use"):
        proc.add_request(make_request(), None)
    assert outputs_of(proc.process_outputs([out("r", "x", FinishReason.LENGTH)]))


# -- abort -----------------------------------------------------------------------------------------------------------


def test_abort_by_either_id_gives_a_last_output() -> None:
    for internal, name in ((False, "ext-r"), (True, "r")):
        proc = processor()
        queue = RequestOutputCollector(CUMULATIVE, "r")
        proc.add_request(make_request(), None, queue=queue)
        proc.process_outputs([out("r", "foo")])
        assert proc.abort_requests([name, "unknown"], internal) == ["r"]
        output = queue.get_nowait()
        assert (output.finished, output.outputs[0].text, output.outputs[0].finish_reason) == (
            True,
            "foo",
            "abort",
        )
        assert_empty(proc)
        assert proc.abort_requests([name], internal) == []


def add_children(proc: OutputProcessor, n: int, queue: Any = None, **params: Any) -> ParentRequest:
    request = make_request("p", n=n, **params)
    parent = ParentRequest(request)
    for index in range(n):
        child_id, child_params = parent.get_child_info(index)
        child = make_request(child_id, **params)
        child.sampling_params = child_params
        proc.add_request(child, None, parent, index, queue)
    return parent


@pytest.mark.parametrize("name", ["ext-p", "p"])
def test_sch_13_a_thousand_aborts_of_n_4_leave_nothing(name: str) -> None:
    proc = processor()
    for _ in range(1000):
        queue = RequestOutputCollector(DELTA, "p")
        add_children(proc, 4, queue, output_kind=DELTA)
        proc.process_outputs([out("0_p", [40]), out("1_p", [41]), out("2_p", [42], FinishReason.LENGTH)])
        assert sorted(proc.abort_requests([name], internal=name == "p")) == ["0_p", "1_p", "3_p"]
        assert_empty(proc)


@pytest.mark.parametrize("kind", [DELTA, FINAL])
def test_children_join_to_one_request(kind: RequestOutputKind) -> None:
    proc = processor()
    add_children(proc, 3, output_kind=kind, seed=5)
    seen = []
    for index in (2, 0, 1):
        seen += outputs_of(proc.process_outputs([out(f"{index}_p", f"a{index}", FinishReason.LENGTH)]))
    assert seen[-1].finished
    assert all(not output.finished for output in seen[:-1])
    assert {output.request_id for output in seen} == {"ext-p"}
    texts = {c.index: c.text for output in seen for c in output.outputs}
    assert texts == {0: "a0", 1: "a1", 2: "a2"}
    if kind == FINAL:
        assert [c.index for c in seen[0].outputs] == [0, 1, 2]
    assert_empty(proc)


def test_seeds_of_children_differ_and_parameters_are_shared_without_a_seed() -> None:
    seeded = ParentRequest(make_request(n=3, seed=7))
    assert [seeded.get_child_info(i)[1].seed for i in range(3)] == [7, 8, 9]
    plain = ParentRequest(make_request(n=3))
    params = [plain.get_child_info(i)[1] for i in range(3)]
    assert params[0] is params[1] is params[2]
    assert params[0].n == 1
    assert plain.n == 3


def test_dead_engine_reaches_every_reader() -> None:
    proc = processor()
    queues = [RequestOutputCollector(FINAL, str(i)) for i in range(3)]
    for i, queue in enumerate(queues):
        proc.add_request(make_request(str(i), output_kind=FINAL), None, queue=queue)
    proc.propagate_error(RuntimeError("dead"))
    for queue in queues:
        with pytest.raises(RuntimeError, match="dead"):
            queue.get_nowait()
    assert_empty(proc)


# -- log probabilities ---------------------------------------------------------------------------------------------


def rows(*positions: list[tuple[int, float]], ranks: list[int] | None = None) -> LogprobsLists:
    ids = np.array([[i for i, _ in row] for row in positions], dtype=np.int32)
    values = np.array([[v for _, v in row] for row in positions], dtype=np.float32)
    return LogprobsLists(ids, values, np.array(ranks or [1] * len(positions), dtype=np.int32))


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_logprobs_follow_their_tokens(kind: RequestOutputKind) -> None:
    proc = processor()
    proc.add_request(make_request(output_kind=kind, logprobs=1), None)
    first = rows([(40, -2.0), (50, -0.5), (51, -3.0)], ranks=[2])
    second = rows([(41, -0.25), (41, -0.25), (9, -9.0)])
    seen = outputs_of(proc.process_outputs([out("r", [40], new_logprobs=first)]))
    seen += outputs_of(proc.process_outputs([out("r", [41], FinishReason.LENGTH, new_logprobs=second)]))
    last = seen[-1].outputs[0]
    assert last.cumulative_logprob == pytest.approx(-2.25)
    positions = (
        [p for output in seen for p in output.outputs[0].logprobs] if kind == DELTA else list(last.logprobs)
    )
    assert [list(position) for position in positions] == [[40, 50], [41]]
    assert positions[0][40].rank == 2
    assert positions[0][50].rank == 1
    assert positions[0][50].decoded_token == TOKENIZER.decode([50])


def test_tokens_behind_a_stop_string_have_no_logprobs() -> None:
    proc = processor()
    proc.add_request(make_request(output_kind=DELTA, logprobs=0, stop=["a"]), None)
    ids = [TOKENIZER.encode(c)[0] for c in "xab"]
    made = proc.process_outputs([out("r", ids, new_logprobs=rows(*[[(i, -1.0)] for i in ids]))])
    completion = outputs_of(made)[0].outputs[0]
    assert len(completion.token_ids) == len(completion.logprobs) == 2


def test_prompt_logprobs_start_with_none() -> None:
    proc = processor()
    proc.add_request(make_request(prompt_logprobs=1, output_kind=DELTA), None)
    lists = rows([(60, -1.0), (61, -0.1)], [(62, -2.0), (62, -2.0)])
    tensors = LogprobsTensors(lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks)
    first = outputs_of(proc.process_outputs([out("r", [40], new_prompt_logprobs_tensors=tensors)]))[0]
    assert first.prompt_logprobs[0] is None
    assert [list(position) for position in first.prompt_logprobs[1:]] == [[60, 61], [62]]
    second = outputs_of(proc.process_outputs([out("r", [41], FinishReason.LENGTH)]))[0]
    assert not second.prompt_logprobs


@pytest.mark.parametrize(("kind", "later"), [(DELTA, None), (CUMULATIVE, [[-1.0, -2.0]])])
def test_prompt_logprobs_of_given_tokens_are_delivered_and_deltas_do_not_repeat_them(kind, later) -> None:
    proc = processor()
    proc.add_request(make_request(prompt_logprob_token_ids=[3, 4], output_kind=kind), None)
    scores = [[-1.0, -2.0]]
    first = outputs_of(proc.process_outputs([out("r", [40], prompt_token_id_logprobs=scores)]))[0]
    assert first.prompt_token_id_logprobs == scores
    second = outputs_of(proc.process_outputs([out("r", [41])]))[0]
    assert second.prompt_token_id_logprobs == later
    second.add(first, aggregate=True)
    assert second.prompt_token_id_logprobs == scores


def test_text_of_a_token_is_whole_characters() -> None:
    proc = processor()
    ids = TOKENIZER.encode("語")
    assert len(ids) == 3
    proc.add_request(make_request(output_kind=CUMULATIVE, logprobs=0), None)
    made = proc.process_outputs(
        [out("r", ids, FinishReason.LENGTH, new_logprobs=rows(*[[(i, -1.0)] for i in ids]))]
    )
    positions = outputs_of(made)[0].outputs[0].logprobs
    assert [p[i].decoded_token for p, i in zip(positions, ids, strict=True)] == ["", "", "語"]


# -- collectors ------------------------------------------------------------------------------------------------------


def request_output(text: str, finished: bool = False, index: int = 0) -> RequestOutput:
    proc = processor()
    proc.add_request(make_request(output_kind=DELTA), None, request_index=index)
    made = proc.process_outputs([out("r", text, FinishReason.LENGTH if finished else None)])
    return outputs_of(made)[0]


async def test_unread_deltas_merge_and_a_reader_waits() -> None:
    collector = RequestOutputCollector(DELTA, "r")
    assert collector.get_nowait() is None
    collector.put(request_output("foo"))
    collector.put(request_output(" bar", finished=True))
    merged = await collector.get()
    assert merged.outputs[0].text == "foo bar"
    assert merged.finished
    waiting = asyncio.ensure_future(collector.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    collector.put(ValueError("gone"))
    collector.put(request_output("x"))
    with pytest.raises(ValueError, match="gone"):
        await waiting


async def test_unread_cumulative_outputs_replace_each_other() -> None:
    collector = RequestOutputCollector(CUMULATIVE, "r")
    collector.put(request_output("a"))
    collector.put(request_output("ab"))
    collector.put(request_output("z", index=1))
    output = await collector.get()
    assert [(c.index, c.text) for c in output.outputs] == [(0, "ab"), (1, "z")]


async def test_a_closed_collector_drops_everything() -> None:
    collector = RequestOutputCollector(DELTA, "r")
    collector.put(request_output("a"))
    collector.close()
    collector.put(request_output("b"))
    assert collector.get_nowait() is None


async def test_chunk_finals_of_streaming_input_stay_apart() -> None:
    collector = StreamingInputOutputCollector(DELTA, "r")
    collector.put(request_output("a"))
    collector.put(request_output("b", finished=True))
    collector.put(request_output("c"))
    collector.put(request_output("d", finished=True))
    collector.put(request_output("e"))
    texts = [(await collector.get()).outputs[0].text for _ in range(2)]
    assert [*texts, collector.get_nowait().outputs[0].text] == ["ab", "cd", "e"]
    assert collector.get_nowait() is None


# -- statistics ------------------------------------------------------------------------------------------------------


def test_statistics_of_a_request() -> None:
    proc = processor(log_stats=True)
    proc.add_request(make_request(max_tokens=9), None)
    prefill = PrefillStats()
    prefill.set(6, 4, 0)
    kind = EngineCoreEventType
    events = [
        EngineCoreEvent(kind.QUEUED, 1.0),
        EngineCoreEvent(kind.SCHEDULED, 2.0),
        EngineCoreEvent(kind.PREEMPTED, 2.5),
    ]
    stats = IterationStats(10.0)
    proc.process_outputs([out("r", [40], events=events, prefill_stats=prefill)], 3.0, stats)
    assert (stats.num_prompt_tokens, stats.num_cached_prompt_tokens, stats.num_generation_tokens) == (6, 4, 1)
    assert stats.num_preempted_reqs == 1
    stats = IterationStats(12.0)
    proc.process_outputs([out("r", [41, 42], FinishReason.LENGTH)], 5.0, stats)
    (finished,) = stats.finished_requests
    assert (finished.queued_time, finished.prefill_time, finished.decode_time) == (1.0, 1.0, 2.0)
    assert finished.e2e_latency == 12.0
    assert (finished.num_generation_tokens, finished.num_preemptions, finished.max_tokens_param) == (3, 1, 9)
    assert (stats.n_params_iter, stats.max_num_generation_tokens_iter) == ([1], [3])


def test_statistics_of_a_parent_count_once() -> None:
    proc = processor(log_stats=True)
    add_children(proc, 2)
    stats = IterationStats(1.0)
    proc.process_outputs([out("0_p", [1, 2, 3], FinishReason.LENGTH)], 1.0, stats)
    assert stats.n_params_iter == []
    proc.process_outputs([out("1_p", [1], FinishReason.LENGTH)], 1.0, stats)
    assert (stats.n_params_iter, stats.max_num_generation_tokens_iter) == ([2], [3])


def test_queued_figures_fall_with_the_first_token() -> None:
    proc = processor()
    proc.add_request(make_request("a"), None)
    proc.add_request(make_request("b"), None)
    tokens = len(TOKENIZER.encode("hello "))
    assert (proc.get_num_queued_requests(), proc.get_num_queued_tokens()) == (2, 2 * tokens)
    proc.process_outputs([out("a", [40])])
    assert (proc.get_num_queued_requests(), proc.get_num_queued_tokens()) == (1, tokens)
