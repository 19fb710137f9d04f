"""A server that runs out of file descriptors says so once and goes on."""

import errno
import logging
import resource
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from unittest.mock import Mock

import pytest

from vllm.entrypoints.openai.descriptors import QUIET_S, AcceptFailures, raise_descriptor_limit


@dataclass
class Clock:
    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize(("before", "after"), [((64, 256), (256, 256)), ((256, 256), (256, 256))])
def test_the_soft_limit_is_raised_to_the_hard_one(before, after, monkeypatch):
    limits = [before]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.append(pair))
    raise_descriptor_limit()
    assert limits[-1] == after


def test_a_limit_that_cannot_be_raised_is_told(monkeypatch, caplog):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 256))
    monkeypatch.setattr(resource, "setrlimit", Mock(side_effect=ValueError("not allowed")))
    with caplog.at_level(logging.WARNING):
        raise_descriptor_limit()
    assert "not allowed" in caplog.text


def test_failed_accepts_are_told_once_in_a_while_and_the_rest_as_ever(caplog):
    clock, loop = Clock(), Mock()
    handler = AcceptFailures(clock)
    failed = {"message": "socket.accept() out of system resource", "exception": OSError(errno.EMFILE, "full")}
    with caplog.at_level(logging.WARNING):
        for _ in range(5000):
            handler(loop, failed)
        assert len(caplog.records) == 1
        clock.now += QUIET_S
        handler(loop, failed)
    assert len(caplog.records) == 2
    loop.default_exception_handler.assert_not_called()
    handler(loop, {"message": "a defect"})
    loop.default_exception_handler.assert_called_once()


@pytest.mark.parametrize("tells", [True, False])
def test_a_real_loop_without_descriptors_is_quiet(tells):
    # What the handler looks for are texts of the event loop: this fails if they change.
    script = f"""
    import asyncio, logging, resource, socket
    from vllm.entrypoints.openai.descriptors import AcceptFailures
    async def main():
        if {tells}:
            asyncio.get_running_loop().set_exception_handler(AcceptFailures())
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        client = socket.socket()
        client.setblocking(False)
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1,) * 2)
        client.connect_ex(address)
        await asyncio.sleep(0.2)
        server.close()
        await asyncio.sleep(1.2)
    asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    output = done.stdout + done.stderr
    assert output.count("New connections have to wait") == tells
    assert ("Traceback" in output) is not tells
