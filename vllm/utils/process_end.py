"""The quick end of a process that has released all it held, or holds nothing yet.  Layer: L0.

Must not know what the process did.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def end_process(status: int) -> NoReturn:
    """End at once, with everything written that was to be written.

    Taking a million records and the model library apart one by one, as the interpreter would, takes seconds.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_now(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def end_at_interrupt() -> None:
    """From now on SIGINT ends the process at once and in silence, even if it was ignored: nothing is held yet.

    An exception instead would show its stack, or come out of an import as something else. Main thread only.
    """
    signal.signal(signal.SIGINT, _end_now)


def raise_at_interrupt() -> None:
    """From now on SIGINT raises KeyboardInterrupt, after `end_at_interrupt`; other handlers are left alone."""
    if signal.getsignal(signal.SIGINT) is _end_now:
        signal.signal(signal.SIGINT, signal.default_int_handler)
