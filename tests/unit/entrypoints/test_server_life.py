"""Start and end of the server: readiness, signals, a taken port, a dead engine. A real socket, a scripted engine."""

import argparse
import asyncio
import os
import signal
import socket

import httpx
import pytest

from tests.helpers.http_app import App, says
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.entrypoints.openai import api_server
from vllm.entrypoints.openai.api_server import bind_socket, serve_app
from vllm.utils.argparse_utils import FlexibleArgumentParser


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def args():
    flags = ["m", "--host", "127.0.0.1", "--port", str(free_port()), "--uvicorn-log-level", "error"]
    return make_arg_parser(FlexibleArgumentParser()).parse_args(flags)


async def start(args, app):
    sock = bind_socket(args)
    task = asyncio.create_task(serve_app(args, app.app, sock))
    return task, sock


async def until_ready(address, **options):
    async with httpx.AsyncClient(base_url=address, **options) as client:
        for _ in range(200):
            try:
                return await client.get("/health")
            except httpx.HTTPError:
                await asyncio.sleep(0.02)
    raise AssertionError("the server never answered")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_server_with_status_zero(args, tmp_path, caplog, number):
    app = App(tmp_path, says("x"))
    app.engine.answers["get_kv_event_sources"] = {
        "0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}
    }
    app.engine.vllm_config.cache_config.kv_cache_size_tokens = 4096
    app.engine.vllm_config.cache_config.simple_cpu_offload_num_blocks = 7
    task, sock = await start(args, app)
    assert (await until_ready(f"http://127.0.0.1:{args.port}")).status_code == 200
    assert (
        f"Server ready: listening on http://127.0.0.1:{args.port} (model m, KV cache of 4096 tokens, host tier of "
        "7 blocks, KV events on tcp://*:5557, replay on tcp://*:5558)"
    ) in caplog.text
    os.kill(os.getpid(), number)
    assert await asyncio.wait_for(task, 10) == 0
    sock.close()


async def test_running_requests_end_with_the_server(args, tmp_path):
    app = App(tmp_path, says("a", "b"), hold=asyncio.Event())
    task, sock = await start(args, app)
    address = f"http://127.0.0.1:{args.port}"
    await until_ready(address)

    async def ask():
        async with httpx.AsyncClient(base_url=address) as client:
            return await client.post("/v1/completions", json={"prompt": "x"})

    request = asyncio.create_task(ask())
    while not app.engine.calls:
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(task, 10) == 0
    assert app.call.ended == "aborted"
    assert ("pause_generation", "abort") in app.engine.control
    await asyncio.gather(request, return_exceptions=True)
    sock.close()


async def test_the_death_of_the_engine_ends_the_server_with_an_error(args, tmp_path, monkeypatch):
    monkeypatch.setattr(api_server, "HEALTH_INTERVAL_S", 0.02)
    app = App(tmp_path, says("x"))
    task, sock = await start(args, app)
    await until_ready(f"http://127.0.0.1:{args.port}")
    app.engine.dead = True
    assert await asyncio.wait_for(task, 10) == 1
    sock.close()


async def test_an_engine_that_ends_by_the_same_signal_is_no_failure(args, tmp_path, monkeypatch):
    async def dies(engine):
        engine.dead = True

    monkeypatch.setattr(api_server, "_end_requests", dies)
    app = App(tmp_path, says("x"))
    task, sock = await start(args, app)
    await until_ready(f"http://127.0.0.1:{args.port}")
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(task, 10) == 0
    assert app.engine.dead
    sock.close()


async def test_the_server_may_outlive_its_engine(args, tmp_path, monkeypatch):
    monkeypatch.setattr(api_server, "HEALTH_INTERVAL_S", 0.02)
    monkeypatch.setenv("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
    app = App(tmp_path, says("x"))
    task, sock = await start(args, app)
    address = f"http://127.0.0.1:{args.port}"
    await until_ready(address)
    app.engine.dead = True
    await asyncio.sleep(0.1)
    assert (await until_ready(address)).status_code == 503
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(task, 10) == 1
    sock.close()


async def test_a_unix_socket(args, tmp_path, caplog):
    args.uds = str(tmp_path / "s")
    task, sock = await start(args, App(tmp_path / "m", says("x")))
    transport = httpx.AsyncHTTPTransport(uds=args.uds)
    assert (await until_ready("http://local", transport=transport)).status_code == 200
    for _ in range(500):  # the line follows the first reply
        if "listening on unix:" in caplog.text:
            break
        await asyncio.sleep(0.01)
    assert "listening on unix:" in caplog.text
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 10)
    sock.close()


async def test_access_log_lines_can_be_left_out(args, tmp_path, capsys):
    args.uvicorn_log_level = "info"
    args.disable_access_log_for_endpoints = "/health, /metrics"
    task, sock = await start(args, App(tmp_path, says("x")))
    address = f"http://127.0.0.1:{args.port}"
    await until_ready(address)
    async with httpx.AsyncClient(base_url=address) as client:
        await client.get("/version")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 10)
    sock.close()
    seen = "".join(capsys.readouterr())
    assert '"GET /version' in seen
    assert '"GET /health' not in seen


def test_a_taken_port_is_reported_before_anything_starts(args):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", args.port))
        taken.listen()
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{args.port}"):
            bind_socket(args)


def test_ipv6_addresses_make_an_ipv6_socket(monkeypatch):
    families = []

    class Probe(socket.socket):
        def __init__(self, family, kind):
            families.append(family)
            super().__init__(family, kind)

        def bind(self, address):
            raise OSError(99, "no such address")

    monkeypatch.setattr(api_server.socket, "socket", Probe)
    with pytest.raises(ValueError, match="cannot listen on ::1:8000: no such address"):
        bind_socket(argparse.Namespace(uds=None, host="::1", port=8000))
    assert families == [socket.AF_INET6]


def test_a_socket_file_that_cannot_be_made_is_named(tmp_path):
    path = str(tmp_path / "nowhere" / "s")
    with pytest.raises(ValueError, match=f"cannot listen on {path}: No such file"):
        bind_socket(argparse.Namespace(uds=path, host=None, port=8000))


def test_a_socket_file_of_a_killed_server_is_replaced_and_others_are_not(args, tmp_path):
    args.uds = str(tmp_path / "s")
    left = bind_socket(args)
    with pytest.raises(ValueError, match="Address already in use"):
        bind_socket(args)
    left.close()  # as a kill does: the file stays
    sock = bind_socket(args)
    api_server.close_socket(args, sock)
    assert not list(tmp_path.iterdir())
    (tmp_path / "s").write_text("mine")
    with pytest.raises(ValueError, match="Address already in use"):
        bind_socket(args)
    assert (tmp_path / "s").read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--middleware", "nowhere.at.all"], "'nowhere.at.all' cannot be imported"),
        (["--ssl-certfile", "no.pem", "--ssl-keyfile", "no.key"], "no.pem"),
        (["--uvicorn-log-level", "loud"], "'loud' is none of"),
        (["--allowed-origins", '"*"'], "must be a JSON list"),
    ],
)
def test_flags_of_the_server_are_checked_before_the_model_loads(flags, words):
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["m", *flags])
    with pytest.raises(ValueError, match=words):
        api_server.prepare(args)


def test_run_server_joins_engine_and_server(args, tmp_path, monkeypatch):
    app = App(tmp_path, says("x"))
    engine = app.engine
    args.model_tag = engine.vllm_config.model_config.model
    ended = []
    engine.shutdown = lambda: ended.append(True)

    async def serve(given, made, sock):
        assert made.state.serving.engine_client is engine
        return 5

    monkeypatch.setattr(
        api_server.AsyncLLM, "from_vllm_config", classmethod(lambda cls, config, **options: engine)
    )
    monkeypatch.setattr(api_server, "serve_app", serve)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert api_server.run_server(args) == 5
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == [True]
    with pytest.raises(SystemExit) as stop:
        api_server._raise_exit(signal.SIGTERM, None)
    assert stop.value.code == 143
