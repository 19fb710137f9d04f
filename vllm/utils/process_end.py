"""The quick end of a process that has released all it held.  Layer: L0.

Must not know what the process did.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


def end_process(status: int) -> NoReturn:
    """End at once, with everything written that was to be written.

    Taking a million records and the model library apart one by one, as the interpreter would, takes seconds.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
