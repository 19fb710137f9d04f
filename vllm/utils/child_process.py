"""Starting a child with an interpreter of its own, and how the two notice each other's end.  Layer: L0.

Owns the way a start message reaches the child: over its standard input, which stays open as long as the parent lives.
Must not know what the child does.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, cast

from vllm.utils.process_end import end_process
from vllm.utils.registry import resolve_object

PARENT_POLL_S = 1.0
IMPORT_POLL_S = 0.1


def start_python(
    module: str, message: bytes, variables: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Run `module.main()`, which returns the exit status, in a new process with `message` on its standard input.

    Safe whatever threads this process has. `variables` come on top of this process's environment. SIGINT stays blocked
    until the child minds it: Ctrl-C reaches the whole group, also a child that still imports.
    """
    environment = {
        # OpenMP workers that spin for long take the core from the front end and the copy threads: with
        # another busy process on a small machine a step gets many times slower. A short spin keeps the speed of a
        # quiet machine. A user's own choice wins.
        "GOMP_SPINCOUNT": "10000",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        **variables,
    }
    command = [sys.executable, "-m", "vllm.utils.child_process", module, str(os.getpid())]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=tuple(pass_fds))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert process.stdin is not None
    try:
        process.stdin.write(len(message).to_bytes(8, "little") + message)
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended already; who waits for it is told its status
    return process


def read_start_message() -> bytes:
    """In the child: what its parent wrote. EOFError if the parent ended meanwhile."""
    return _read_exactly(0, int.from_bytes(_read_exactly(0, 8), "little"))


def _read_exactly(descriptor: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(descriptor, min(1 << 20, size - len(data)))
        if not chunk:
            raise EOFError("the parent closed the pipe before the start message was complete")
        data += chunk
    return bytes(data)


def watch_parent(parent_pid: int, pipe: int, on_end: Callable[[], None]) -> None:
    """Start a thread that calls `on_end` when the parent is gone: `pipe` reads end-of-file, or this process has another."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            readable, _, _ = select.select([pipe], [], [], PARENT_POLL_S)
            if readable and not os.read(pipe, 1):
                break
        on_end()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _end_with_parent(parent_pid: int, imported: threading.Event) -> None:
    while not imported.wait(IMPORT_POLL_S):
        if os.getppid() != parent_pid:
            os._exit(1)


def main(module: str, parent_pid: int) -> NoReturn:
    """The child: what it runs may take seconds to import, and nobody may be left meanwhile who wants it."""
    imported = threading.Event()
    threading.Thread(target=_end_with_parent, args=(parent_pid, imported), daemon=True).start()
    run = cast(Callable[[], int], resolve_object(f"{module}:main"))
    imported.set()
    end_process(run())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
