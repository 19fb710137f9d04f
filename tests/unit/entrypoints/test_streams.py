"""Joint streams, early errors, keep-alive comments, and clients that leave."""

import asyncio

import pytest

from tests.helpers.fake_engine import Step
from tests.helpers.http_app import App, says
from vllm.entrypoints.openai.fan_in import Primed, fan_in
from vllm.entrypoints.serve.utils.sse_keep_alive import SSE_KEEP_ALIVE_COMMENT, with_sse_keep_alive


class Source:
    """A stream of items that notes when it is closed. An exception among the items is raised."""

    def __init__(self, *items, gate=None):
        self.items = items
        self.gate = gate
        self.closed = False

    async def stream(self):
        try:
            for item in self.items:
                if self.gate is not None:
                    await self.gate.wait()
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


async def collect(stream):
    return [item async for item in stream]


@pytest.mark.parametrize("count", [1, 3])
async def test_fan_in_gives_every_item_with_its_source(count):
    sources = [Source(*range(100)) for _ in range(count)]
    pairs = await collect(fan_in([source.stream() for source in sources]))
    for index in range(count):
        assert [item for source, item in pairs if source == index] == list(range(100))
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_the_first_error_ends_the_joint_stream_and_closes_all(count):
    never = asyncio.Event()
    sources = [Source(1, ValueError("boom")), *(Source(1, gate=never) for _ in range(count - 1))]
    with pytest.raises(ValueError, match="boom"):
        await collect(fan_in([source.stream() for source in sources]))
    assert sources[0].closed
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_closing_the_joint_stream_closes_the_sources(count):
    sources = [Source(*range(10)) for _ in range(count)]
    joint = fan_in([source.stream() for source in sources])
    await anext(joint)
    await joint.aclose()
    assert all(source.closed for source in sources)


async def test_primed_raises_early_and_gives_everything_later():
    with pytest.raises(ValueError, match="early"):
        await Primed(Source(ValueError("early")).stream()).wait()
    primed = Primed(Source(1, 2).stream())
    await primed.wait()
    assert await collect(primed.read()) == [1, 2]
    empty = Primed(Source().stream())
    await empty.wait()
    assert await collect(empty.read()) == []
    assert await collect(Primed(Source(3).stream()).read()) == [3]


async def test_primed_does_not_wait_longer_than_asked():
    gate = asyncio.Event()
    source = Source(1, gate=gate)
    primed = Primed(source.stream())
    await primed.wait(timeout=0.01)
    gate.set()
    assert await collect(primed.read()) == [1]
    waiting = Source(1, gate=asyncio.Event())
    primed = Primed(waiting.stream())
    await primed.wait(timeout=0.01)
    reader = primed.read()
    task = asyncio.create_task(anext(reader))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await reader.aclose()
    assert waiting.closed


async def test_cancelling_the_wait_closes_the_stream():
    source = Source(1, gate=asyncio.Event())
    task = asyncio.create_task(Primed(source.stream()).wait())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert source.closed


# --- keep-alive ---------------------------------------------------------------------------------------------------


async def test_silence_is_filled_with_comments():
    gate = asyncio.Event()
    source = Source("a", "b", gate=gate)
    stream = with_sse_keep_alive(source.stream(), 0.01)
    assert [await anext(stream) for _ in range(2)] == [SSE_KEEP_ALIVE_COMMENT] * 2
    gate.set()
    assert [item for item in await collect(stream) if item != SSE_KEEP_ALIVE_COMMENT] == ["a", "b"]
    assert source.closed
    assert SSE_KEEP_ALIVE_COMMENT.startswith(":")
    assert SSE_KEEP_ALIVE_COMMENT.endswith("\n\n")


async def test_an_interval_of_zero_adds_nothing():
    source = Source("a", "b")
    assert await collect(with_sse_keep_alive(source.stream(), 0)) == ["a", "b"]
    assert source.closed


async def test_closing_a_silent_stream_closes_its_source():
    source = Source("a", gate=asyncio.Event())
    stream = with_sse_keep_alive(source.stream(), 0.01)
    await anext(stream)
    await stream.aclose()
    assert source.closed


async def test_errors_pass_through():
    with pytest.raises(ValueError, match="boom"):
        await collect(with_sse_keep_alive(Source("a", ValueError("boom")).stream(), 1))


async def test_the_server_sends_comments_before_the_first_token(tmp_path):
    hold = asyncio.Event()
    app = App(tmp_path, says("late"), ["--sse-keep-alive-interval", "0.02"], hold=hold)
    asyncio.get_running_loop().call_later(1.0, hold.set)
    reply = await app.post("/v1/completions", {"prompt": "a", "stream": True})
    assert reply.text.startswith(SSE_KEEP_ALIVE_COMMENT)
    assert '"text":"late"' in reply.text
    assert reply.text.endswith("data: [DONE]\n\n")


# --- clients that leave -------------------------------------------------------------------------------------------


async def leave_while_waiting(app, body, path="/v1/completions"):
    """Send a request and close the connection once the engine has it; True if the app ended its work."""
    import json

    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    gone = asyncio.Event()
    sent = []
    messages = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    task = asyncio.create_task(app.app(scope, receive, send))
    while not app.engine.calls:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    gone.set()
    await asyncio.wait_for(task, 5)
    return sent


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"prompt": ["a", "b"], "n": 2}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_requests(tmp_path, body, stream):
    app = App(tmp_path, lambda call, sample: [Step("a", [1]), Step("b", [2], "stop")], hold=asyncio.Event())
    await leave_while_waiting(app, {**body, "stream": stream})
    assert [call.ended for call in app.engine.calls] == ["aborted"] * len(app.engine.calls)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_client_that_leaves_aborts_its_request(tmp_path, stream):
    app = App(tmp_path, says("a", "b"), hold=asyncio.Event())
    body = {"messages": [{"role": "user", "content": "x"}], "stream": stream}
    await leave_while_waiting(app, body, "/v1/chat/completions")
    assert app.call.ended == "aborted"


async def test_a_client_that_leaves_before_the_first_token_aborts_too(tmp_path):
    app = App(tmp_path, says("only"), hold=asyncio.Event())
    sent = await leave_while_waiting(app, {"prompt": "a", "stream": True})
    assert app.call.ended == "aborted"
    assert sent[0]["status"] == 499
