"""`vllm`: the program. Layer: L8.

Imports next to nothing: from the first moment on an interrupt ends the program without a stack trace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Final, cast

from vllm.utils.process_end import end_at_interrupt, end_process
from vllm.utils.registry import resolve_object

RUN: Final = "vllm.entrypoints.cli.commands:run"


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
    status = run(sys.argv[1:])
    if sys.argv[1:2] == ["serve"]:
        end_process(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
