"""Entries of child processes, for tests of how they are started."""

from __future__ import annotations

import os
import signal

from vllm.utils.child_process import read_start_message, watch_parent


def main() -> int:
    """Says who it is and what it was told, then lives as long as its parent; the message chooses the status."""
    message = read_start_message()
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    told = [str(os.getpid()), message.decode(), os.environ["COLOUR"], str(blocked)]
    os.write(1, " ".join(told).encode() + b"\n")
    if message != b"stay":
        return 7
    watch_parent(os.getppid(), 0, lambda: os._exit(3))
    signal.pause()
    return 0
