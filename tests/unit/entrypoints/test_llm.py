"""The LLM class with a real tiny engine in this process."""

import pytest

from tests.helpers.engine_configs import engine_args
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.entrypoints.beam_search import BeamSearchSequence, beam_score, beam_search
from vllm.exceptions import VLLMNotImplementedError, VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import BeamSearchParams

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        made = LLM.from_engine_args(engine_args(disable_log_stats=False))
        yield made
        made.shutdown()


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def test_answers_come_in_the_order_of_the_prompts(llm):
    prompts = ["hello", "the quick brown fox", "a"]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in together] == prompts
    assert texts(together) == texts([llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts])
    assert all(output.finished for output in together)


def test_every_form_of_prompt(llm):
    ids = llm.get_tokenizer().encode("hello")
    answers = [
        llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        for prompt in (
            "hello",
            ids,
            {"prompt": "hello"},
            TokensPrompt(prompt_token_ids=ids),
            ["hello"],
            [ids],
        )
    ]
    assert all(list(answer) == list(answers[0]) for answer in answers)


def test_parameters_per_prompt(llm):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 3)]
    outputs = llm.generate(["a", "b"], params, use_tqdm=False, priority=[0, 0])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 3]
    for bad in ({"sampling_params": params[:1]}, {"priority": [1]}):
        with pytest.raises(ValueError, match="1 entries for 2 prompts"):
            llm.generate(["a", "b"], use_tqdm=False, **bad)


def test_parameters_of_the_caller_are_not_changed(llm):
    params = SamplingParams(max_tokens=2)
    before = params.clone()
    llm.generate("a", params, use_tqdm=False)
    assert params == before


def test_one_bad_prompt_answers_none(llm):
    with pytest.raises(VLLMValidationError, match="outside the vocabulary"):
        llm.generate(["a", "b"], [GREEDY, SamplingParams(logit_bias={9999: 1})], use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.generate("a", GREEDY, use_tqdm=False)) == 1


def test_queueing_and_waiting_are_separate(llm):
    first = llm.enqueue(["a", "b"], GREEDY)
    second = llm.enqueue_chat([{"role": "user", "content": "hi"}], GREEDY)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == first + second


def test_conversations(llm):
    message = {"role": "user", "content": "hi"}
    single = llm.chat([message], GREEDY, use_tqdm=False)
    double = llm.chat([[message], [message]], GREEDY, use_tqdm=False)
    assert texts(double) == texts(single) * 2
    assert "hi" in single[0].prompt
    custom = llm.chat([message], GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}!")
    assert custom[0].prompt == "hi!"
    llm.enqueue_chat(
        [message],
        GREEDY,
        chat_template="{{ messages[0].content }}{{ tools[0].function.name }}{{ x }}",
        tools=[{"type": "function", "function": {"name": "f"}}],
        chat_template_kwargs={"x": "y"},
    )
    assert llm.wait_for_completion(use_tqdm=False)[0].prompt == "hify"


def test_several_samples(llm):
    output = llm.generate("a", SamplingParams(n=3, max_tokens=2, seed=1), use_tqdm=False)[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]


def test_prefix_cache_is_used_and_reset(llm):
    prompt = "the quick brown fox jumps over the lazy dog " * 2
    llm.generate(prompt, GREEDY, use_tqdm=False)
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache() is True
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_metrics_and_facts(llm):
    assert any(metric.name.startswith("vllm:") for metric in llm.get_metrics())
    assert llm.get_world_size() == llm.get_world_size(include_dp=False) == 1
    assert isinstance(llm.get_default_sampling_params(), SamplingParams)


def test_pooling_is_refused_clearly(llm):
    for method in (llm.encode, llm.embed, llm.classify, llm.score):
        with pytest.raises(VLLMNotImplementedError, match="pooling"):
            method("a")
    with pytest.raises(VLLMNotImplementedError, match="text only"):
        llm.generate("a", GREEDY, mm_processor_kwargs={"x": 1})


def test_progress_bar_can_be_replaced(llm):
    from tqdm import tqdm

    made = []

    def bar(**options):
        made.append(options["total"])
        return tqdm(**{**options, "disable": True})

    llm.generate(["a", "b"], GREEDY, use_tqdm=bar)
    assert made == [2]


def test_interrupted_waiting_aborts_what_is_left(llm, monkeypatch):
    llm.enqueue(["a", "b"], SamplingParams(max_tokens=50, ignore_eos=True))

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.wait_for_completion(use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.generate("a", GREEDY, use_tqdm=False)) == 1


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="no/such"):
        LLM("no/such")
    with pytest.raises(TypeError, match="max_num_sequences"):
        LLM("no/such", max_num_sequences=3)


# --- beam search --------------------------------------------------------------------------------------------------


def test_beam_search_with_the_engine(llm):
    output = llm.beam_search(["hello"], BeamSearchParams(beam_width=3, max_tokens=4))[0]
    assert len(output.sequences) == 3
    scores = [beam.cum_logprob for beam in output.sequences]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [("beam_width", 0), ("max_tokens", 0), ("watermarking", 1), ("structured_outputs", {"regex": "a"})],
)
def test_beam_searches_that_cannot_be_are_refused(llm, field, value):
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    setattr(params, field, value)
    with pytest.raises(VLLMValidationError) as caught:
        llm.beam_search(["hello"], params)
    assert caught.value.parameter == field


class Toy:
    """A model over 4 tokens: 0 ends; after [9, 1] token 2 is very likely, so the greedy first choice 3 loses."""

    eos_token_id = 0

    def encode(self, text):
        return [9]

    def decode(self, ids, skip_special_tokens=True):
        return "-".join(map(str, ids))

    def step(self, prompts, params):
        assert params.max_tokens == 1
        return [self._output(prompt["prompt_token_ids"]) for prompt in prompts]

    def _output(self, ids):
        table = {(9,): {3: -0.5, 1: -0.9}, (9, 1): {2: -0.1, 0: -5.0}, (9, 3): {2: -3.0, 0: -3.0}}
        position = {token: Logprob(value) for token, value in table.get(tuple(ids), {0: -0.1}).items()}
        return RequestOutput("r", None, ids, None, [CompletionOutput(0, "", [0], None, [position])], True)


def test_beam_search_finds_what_greedy_misses():
    toy = Toy()
    best = beam_search(toy.step, toy, "x", BeamSearchParams(2, 2)).sequences
    assert best[0].tokens == [9, 1, 2]
    assert (best[0].text, best[0].finish_reason) == ("1-2", "length")
    ended = beam_search(toy.step, toy, [9], BeamSearchParams(2, 3)).sequences
    assert ended[0].tokens == [9, 1, 2, 0]
    assert (ended[0].finish_reason, ended[0].stop_reason) == ("stop", 0)
    assert ended[0].text == "1-2"
    with_end = BeamSearchParams(2, 3, include_stop_str_in_output=True)
    assert beam_search(toy.step, toy, [9], with_end).sequences[0].text == "1-2-0"
    longest = beam_search(
        toy.step, toy, {"prompt_token_ids": [9]}, BeamSearchParams(1, 2, ignore_eos=True)
    ).sequences
    assert len(longest[0].tokens) == 3


def test_length_penalty():
    beam = BeamSearchSequence([9, 1, 2, 3], cum_logprob=-6.0)
    assert beam_score(beam, 1, 1.0) == -2.0
    assert beam_score(beam, 1, 0.0) == -6.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": None}, "prompts must be Iterable, got NoneType"),
        ({"prompts": 5}, "prompts must be Iterable, got int"),
        ({"sampling_params": {"max_tokens": 1}}, "sampling_params must be SamplingParams, got dict"),
        ({"sampling_params": ["greedy"]}, "sampling_params must be SamplingParams, got str"),
        ({"lora_request": object()}, "lora_request must be .*, got object"),
    ],
)
def test_arguments_of_wrong_types_are_named(llm, options, message):
    with pytest.raises(VLLMValidationError, match=message):
        llm.generate(**{"prompts": "a", "sampling_params": GREEDY, "use_tqdm": False, **options})
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("messages", [None, 5, "hi", ["hi"], [{"role": "user", "content": "x"}, "hi"]])
def test_conversations_of_wrong_types_are_named(llm, messages):
    with pytest.raises(VLLMValidationError, match="messages"):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_memory_taken_back_in_parts_serves_as_before(llm):
    before = texts(llm.generate("hello", GREEDY, use_tqdm=False))
    llm.sleep(1)
    llm.wake_up(["weights"])
    llm.wake_up(["kv_cache"])
    assert texts(llm.generate("hello", GREEDY, use_tqdm=False)) == before


def refusals_while_asleep(llm):
    for level, state in ((1, "asleep"), (0, "paused")):
        llm.sleep(level)
        for call in (lambda: llm.generate("a", GREEDY), lambda: llm.chat([{"role": "user", "content": "a"}])):
            with pytest.raises(RuntimeError, match=rf"{state}.* wake_up\(\)"):
                call()
        llm.wake_up()
        assert llm.generate("a", GREEDY, use_tqdm=False)[0].finished


def test_a_sleeping_engine_refuses_prompts(llm):
    refusals_while_asleep(llm)
    with pytest.raises(ValueError, match="level=7"):
        llm.sleep(7)
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].finished


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_what_was_queued_before_a_sleep_can_be_had(llm, mode):
    llm.enqueue(["a", "b"], GREEDY)
    llm.sleep(0, mode=mode)
    if mode == "keep":
        with pytest.raises(RuntimeError, match=r"paused.* wake_up\(\)"):
            llm.wait_for_completion(use_tqdm=False)
        llm.wake_up()
    outputs = llm.wait_for_completion(use_tqdm=False)
    reason = {"keep": "length", "abort": "abort"}[mode]
    assert [output.outputs[0].finish_reason for output in outputs] == [reason] * 2
    llm.wake_up()


def test_a_sleeping_engine_in_a_process_of_its_own_refuses_prompts(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with LLM.from_engine_args(engine_args()) as made:
        refusals_while_asleep(made)


def test_after_the_end_nothing_is_generated(monkeypatch, capfd):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    made = LLM.from_engine_args(engine_args())
    made.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        made.generate("a", GREEDY, use_tqdm=False)
    made.shutdown()
    assert "Traceback" not in "".join(capfd.readouterr())
