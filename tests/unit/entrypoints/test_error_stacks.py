"""`--log-error-stack`: a stack for each error of the server, once; none for what a client did wrong."""

from __future__ import annotations

import logging

import pytest

from tests.helpers.fake_engine import Step
from tests.helpers.http_app import App, says
from vllm.exceptions import GenerationError, VLLMValidationError

PATH = "/v1/completions"
FLAG = ("--log-error-stack",)


@pytest.fixture(autouse=True)
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[logging.LogRecord]:
    """Records with a stack."""
    kept: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lambda record: kept.append(record) if record.exc_info else None  # type: ignore[method-assign]
    root = logging.getLogger("vllm")
    root.addHandler(handler)
    yield kept
    root.removeHandler(handler)


@pytest.mark.parametrize("flags", [(), FLAG])
async def test_a_client_error_has_no_stack(tmp_path, stacks, flags):
    app = App(tmp_path, lambda call, sample: [VLLMValidationError("no", parameter="prompt")], flags)
    for body in (
        {},
        {"prompt": "a", "temperature": 9},
        {"prompt": "a", "model": "x"},
        {"prompt": "a"},
        "no object",
    ):
        reply = await app.post(PATH, body)
        assert 400 <= reply.status_code < 500
    assert (await app.post("/no/such/route", {})).status_code == 404
    assert (await app.client.get(PATH)).status_code == 405
    text = (await app.post(PATH, {"prompt": "a", "stream": True})).text
    assert '"code":400' in text.replace(" ", "")
    assert stacks == []


@pytest.mark.parametrize(("flags", "count"), [((), 0), (FLAG, 1)])
async def test_a_known_server_error_has_one_with_the_flag(tmp_path, stacks, flags, count):
    app = App(tmp_path, lambda call, sample: [GenerationError("the load failed")], flags)
    reply = await app.post(PATH, {"prompt": "a"})
    assert reply.status_code == 500
    assert [str(record.exc_info[1]) for record in stacks] == ["the load failed"] * count


@pytest.mark.parametrize("flags", [(), FLAG])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_unexpected_error_has_exactly_one(tmp_path, stacks, flags, stream):
    app = App(tmp_path, lambda call, sample: [Step("a", [100]), RuntimeError("a defect")], flags)
    reply = await app.post(PATH, {"prompt": "a", "stream": stream})
    assert reply.status_code == (200 if stream else 500)
    assert "Internal server error" in reply.text
    assert [str(record.exc_info[1]) for record in stacks] == ["a defect"]


async def test_without_errors_nothing_is_logged(tmp_path, stacks):
    await App(tmp_path, says("x"), FLAG).complete()
    assert stacks == []
