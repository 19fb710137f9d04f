"""`make serve`: what the demo server is told and what its user is told."""

from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path

import pytest

from scripts import serve


@pytest.fixture
def free_port(monkeypatch: pytest.MonkeyPatch) -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        port: int = probe.getsockname()[1]
    monkeypatch.setattr(serve, "EVENTS_PORT", port)
    return port


def test_servers_that_start_together_get_different_event_ports(free_port: int) -> None:
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        assert serve.events_endpoint(first) == f"tcp://*:{free_port}"
        assert serve.events_endpoint(second) == "tcp://*:0"
    with socket.socket(socket.AF_UNIX) as later:
        assert serve.events_endpoint(later) == f"tcp://*:{free_port}"


def test_a_taken_event_port_is_not_used(free_port: int) -> None:
    with socket.socket() as other, socket.socket(socket.AF_UNIX) as claim:
        other.bind(("0.0.0.0", free_port))
        assert serve.events_endpoint(claim) == "tcp://*:0"


def test_a_taken_http_port_is_an_error(free_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port))
        assert serve.main(["--port", str(free_port)]) == 1
    assert f"port {free_port} of 127.0.0.1 is in use" in capsys.readouterr().err


def test_what_is_no_port_is_left_to_the_server_to_refuse() -> None:
    assert serve.port_is_free("127.0.0.1", 99_999)
    assert serve.port_is_free("127.0.0.1", -1)


def test_the_printed_request_is_greedy_and_bounded() -> None:
    body = serve.example_body("m")
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0, 64)


def test_the_command_line_publishes_events_where_told() -> None:
    args = argparse.Namespace(host="127.0.0.1", port=8011)
    line = serve.command(Path("/models/m"), "m", "tcp://*:0", args, ["--dtype", "float32"])
    assert json.loads(line[line.index("--kv-events-config") + 1])["endpoint"] == "tcp://*:0"
    assert line[-2:] == ["--dtype", "float32"]
