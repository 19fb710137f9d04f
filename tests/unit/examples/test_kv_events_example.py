"""What the subscriber example tells who started it wrongly, or late."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import zmq

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "kv_events.py"


def test_a_wrong_endpoint_is_one_line_and_no_traceback() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "bad"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "error: endpoint 'bad': Invalid argument" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def lines_of_first_batch(first: int, address: str) -> list[str]:
    """What a subscriber writes about its place when the first batch that it gets has this number."""
    event = {"type": "AllBlocksCleared", "medium": "GPU"}
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        publisher.bind(address)
        process = subprocess.Popen(
            [sys.executable, SCRIPT, address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            # Published until it is seen: a subscriber gets nothing before its connection stands.
            payload = msgspec.msgpack.encode([0.0, [event]])
            sent = [b"", first.to_bytes(8, "big"), payload]
            assert process.stdout is not None
            poller = zmq.Poller()
            poller.register(process.stdout, zmq.POLLIN)
            deadline = time.monotonic() + 30
            while not poller.poll(50) and time.monotonic() < deadline:
                publisher.send_multipart(sent)
            assert "AllBlocksCleared" in process.stdout.readline()
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=30)
    return [line for line in errors.splitlines() if "first batch" in line]


def test_who_comes_late_is_told_what_was_missed_and_how_to_get_it(tmp_path: Path) -> None:
    (line,) = lines_of_first_batch(7, f"ipc://{tmp_path}/late")
    assert "the first batch seen is 7" in line
    assert "replay()" in line
    assert "snapshot()" in line
    assert lines_of_first_batch(0, f"ipc://{tmp_path}/early") == []
