"""Replies that come before the end of a body reach clients that are still sending it, also if the connection closes then."""

import socket
from urllib.parse import urlsplit

import pytest

from tests.helpers.http_app import App, running, says

MILLION = 1_000_000


def answer(url: str, request: bytes, pieces: int) -> bytes:
    """What the server says to somebody who sends all, and only then reads."""
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=30) as client:
        client.sendall(request)
        for _ in range(pieces):
            client.sendall(b"x" * MILLION)
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


def head(path: str, size: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/completions", 413), ("/no/such/path", 404), ("/v1/models", 405)]
)
def test_a_client_that_sends_all_first_sees_why_it_was_refused(tmp_path, path, status):
    with running(App(tmp_path, says("foo"))) as url:
        if status != 413:
            assert answer(url, head(path, 4 * MILLION), 4).startswith(f"HTTP/1.1 {status}".encode())
        else:
            reply = answer(url, head(path, 20 * MILLION), 20)
            assert reply.startswith(b"HTTP/1.1 413"), reply[:100]
            assert b"The request body is larger than" in reply


def test_who_waits_to_be_asked_for_a_body_is_refused_before_it_is_sent(tmp_path):
    request = head("/v1/completions", 20 * MILLION).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
    with running(App(tmp_path, says("foo"))) as url:
        assert answer(url, request, 0).startswith(b"HTTP/1.1 413")
