"""`/v1/completions` against a scripted engine: refusals, response formats, failures of the engine."""

from types import SimpleNamespace

import pytest

from tests.helpers.fake_engine import Step
from tests.helpers.http_app import App, says
from vllm.exceptions import GenerationError, QueueOverflowError, VLLMValidationError

PATH = "/v1/completions"


@pytest.fixture
def app(tmp_path):
    return App(tmp_path, says("foo", " bar"))


# --- refusals -----------------------------------------------------------------------------------------------------

JSON_OBJECT = {"type": "json_object"}
BAD = {
    "no prompt": ({}, "prompt"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "empty list": ({"prompt": []}, "prompt"),
    "embeddings": ({"prompt": "a", "prompt_embeds": "x"}, "prompt_embeds"),
    "suffix": ({"prompt": "a", "suffix": "b"}, "suffix"),
    "best_of": ({"prompt": "a", "best_of": 3}, "best_of"),
    "n": ({"prompt": "a", "n": 0}, "n"),
    "logprobs": ({"prompt": "a", "logprobs": -3}, "logprobs"),
    "max_tokens": ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    "max_tokens type": ({"prompt": "a", "max_tokens": "x"}, "max_tokens"),
    "min_tokens": ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
    "temperature": ({"prompt": "a", "temperature": 3}, "temperature"),
    "beam search": ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
    "stream_options": ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    "cache_salt": ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
    "stop strings": ({"prompt": "a", "stop": list("abcde")}, "stop"),
    "bad words": ({"prompt": "a", "bad_words": ["x"] * 129}, "bad_words"),
    "prompts": ({"prompt": ["x"] * 1025}, "prompt"),
    "seed": ({"prompt": "a", "seed": 2**63}, "seed"),
    "ec": ({"prompt": "a", "ec_transfer_params": {}}, "ec_transfer_params"),
    "offsets": ({"prompt": "a", "return_token_offsets": True}, "return_token_offsets"),
    "bias": ({"prompt": "a", "logit_bias": {"AI": -100}}, "logit_bias"),
    "constraint field": ({"prompt": "a", "structured_outputs": {"regexp": "a"}}, "structured_outputs"),
    "no constraint": ({"prompt": "a", "structured_outputs": {}}, "structured_outputs"),
    "two constraints": ({"prompt": "a", "structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    "both constraints": ({"prompt": "a", "structured_outputs": {"regex": "a"}, "response_format": JSON_OBJECT}, "structured_outputs"),
    "schema": ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format"),
    "flag": ({"prompt": "a", "ignore_eos": "perhaps"}, "ignore_eos"),
    "flag of the text": ({"prompt": "a", "skip_special_tokens": [1]}, "skip_special_tokens"),
    "repetition": ({"prompt": "a", "repetition_detection": {"x": 1}}, "repetition_detection"),
    "budget": ({"prompt": "a", "thinking_token_budget": 1.5}, "thinking_token_budget"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
async def test_a_bad_field_is_400_and_named(app, case):
    body, param = BAD[case]
    error = await app.error(PATH, body)
    assert (error["code"], error["type"], error["param"]) == (400, "BadRequestError", param)
    assert app.engine.calls == []


async def test_unknown_model_is_404(app):
    error = await app.error(PATH, {"prompt": "a", "model": "nope"})
    assert (error["code"], error["type"], error["param"]) == (404, "NotFoundError", "model")
    assert error["message"] == "The model `nope` does not exist."
    assert (await app.complete(model="other"))["model"] == "m"


async def test_model_names_may_be_left_unchecked(app, monkeypatch):
    monkeypatch.setenv("VLLM_SKIP_MODEL_NAME_VALIDATION", "1")
    await app.complete(model="whatever")


async def test_unknown_fields_are_accepted(app):
    await app.complete(brand_new_field={"a": 1})


@pytest.mark.parametrize(
    ("format_", "constraint"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
            {"json": {"type": "object"}},
        ),
    ],
)
async def test_response_formats(app, format_, constraint):
    await app.complete(response_format=format_)
    given = app.call.params.structured_outputs
    assert (None if given is None else given.constraints()) == constraint


async def test_structural_tags_are_passed_on_as_text(app):
    await app.complete(response_format={"type": "structural_tag", "structures": [], "triggers": ["<"]})
    assert '"triggers": ["<"]' in app.call.params.structured_outputs.structural_tag


# --- failures of the engine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (VLLMValidationError("bad id", parameter="logit_bias"), 400, "BadRequestError"),
        (GenerationError("load failed"), 500, "InternalServerError"),
        (QueueOverflowError("too many wait"), 503, "ServiceUnavailableError"),
        (ZeroDivisionError("secret"), 500, "InternalServerError"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_has_its_http_status(tmp_path, error, status, kind, stream):
    app = App(tmp_path, lambda call, sample: [error])
    found = await app.error(PATH, {"prompt": "a", "stream": stream})
    assert (found["code"], found["type"]) == (status, kind)
    assert "secret" not in found["message"]
    assert app.call.ended == "aborted"


async def test_an_error_in_a_stream_is_its_last_event(tmp_path):
    app = App(tmp_path, lambda call, sample: [Step("a", [1]), GenerationError("load failed")])
    chunks = await app.stream(PATH)
    assert chunks[0]["choices"][0]["text"] == "a"
    assert chunks[1]["error"] == {
        "message": "load failed",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }


async def test_a_sample_that_ends_in_an_error_is_500(tmp_path):
    app = App(tmp_path, says("a", finish="error", stop_reason="NaN logits"))
    error = await app.error(PATH, {"prompt": "a"})
    assert (error["code"], error["message"]) == (500, "NaN logits")


async def test_full_queues_say_when_to_come_back(tmp_path):
    app = App(tmp_path, lambda call, sample: [QueueOverflowError("full")])
    reply = await app.post(PATH, {"prompt": "a"})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")


async def test_a_dead_engine_is_500_and_unhealthy(app):
    app.engine.dead = True
    assert (await app.error(PATH, {"prompt": "a"}))["code"] == 500
    assert (await app.client.get("/health")).status_code == 503


async def test_one_bad_prompt_ends_the_others(tmp_path):
    def script(call, sample):
        return (
            [ValueError("boom")] if call.prompt["prompt"] == "b" else [Step("a", [1]), Step("b", [2], "stop")]
        )

    app = App(tmp_path, script)
    assert (await app.error(PATH, {"prompt": ["a", "b"]}))["code"] == 500
    assert [call.ended for call in app.engine.calls] in (["aborted", "aborted"], ["finished", "aborted"])


async def test_per_request_metrics(tmp_path):
    app = App(tmp_path, says("a", "b"), ["--enable-per-request-metrics"])
    stats = SimpleNamespace(
        first_token_ts=2.0,
        last_token_ts=3.0,
        queued_ts=1.0,
        scheduled_ts=1.5,
        first_token_latency=1.1,
        num_generation_tokens=2,
    )
    make = app.engine._output

    def with_stats(*args):
        output = make(*args)
        output.metrics = stats
        return output

    app.engine._output = with_stats
    metrics = (await app.complete())["metrics"]
    assert metrics["time_to_first_token_ms"] == pytest.approx(1100)
    assert (metrics["queue_time_ms"], metrics["mean_itl_ms"], metrics["tokens_per_second"]) == (500, 1000, 1)
    assert (await app.complete(n=2))["metrics"] is None
    chunks = await app.stream(PATH, stream_options={"include_usage": True})
    assert chunks[-1]["metrics"]["generation_time_ms"] == 1000
