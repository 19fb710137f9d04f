"""`vllm`: the program. Layer: L8.

Imports next to nothing: from the first moment on an interrupt ends the program without a stack trace.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Final, cast

from vllm.utils.process_end import end_at_interrupt, end_process
from vllm.utils.registry import resolve_object

RUN: Final = "vllm.entrypoints.cli.commands:run"
TOLD_TO_STOP: Final = 128 + signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status. Errors that the user can mend are one line, not a stack trace.

    Without `argv` this is the program itself: it minds SIGINT, also where a shell started it in the background and
    so with that signal ignored, and a server ends at once when it is told to stop.
    """
    if argv is None:
        end_at_interrupt()
    run = cast(Callable[[list[str]], int], resolve_object(RUN))
    if argv is not None:
        return run(list(argv))
    try:
        status = run(sys.argv[1:])
    except BrokenPipeError as error:
        if not _reader_is_gone():
            print(f"vllm: error: {error}", file=sys.stderr)
        return 1
    except SystemExit as end:  # after a parser's help, and where a server that starts is told to stop
        _reader_is_gone()
        if end.code != TOLD_TO_STOP:
            raise
        status = TOLD_TO_STOP
    _reader_is_gone()
    if sys.argv[1:2] == ["serve"]:
        end_process(status)
    return status


def _reader_is_gone() -> bool:
    """Whether standard output goes to a program that has ended, such as `head`; what is left for it is then dropped."""
    if sys.stdout is None:  # closed by whoever started the program
        return False
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    try:
        output_fd = sys.stdout.fileno()
    except io.UnsupportedOperation:  # somebody collects the output in memory
        return False
    output = select.poll()
    output.register(output_fd, 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output_fd)
    return True


if __name__ == "__main__":
    sys.exit(main())
