"""File descriptors of the HTTP server: as many as allowed, and one line instead of thousands when none is left. Layer: L8."""

from __future__ import annotations

import asyncio
import resource
from typing import Any, Final

from vllm.logger import init_logger
from vllm.utils.clock import Clock, MonotonicClock

logger = init_logger(__name__)

# What a server is given where the hard limit allows it; each connection takes one.
WANTED: Final = 65_535
QUIET_S: Final = 10.0
_ACCEPT_FAILED: Final = "socket.accept() out of system resource"
_TRIES_AGAIN: Final = "_start_serving"


def raise_descriptor_limit() -> None:
    """Lift the soft limit of open files towards `WANTED`, as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        logger.warning("The limit of %d open files cannot be raised: %s", soft, error)


class AcceptFailures:
    """An event loop's exception handler. The loop tries a full backlog of connections again each second and reports each;
    this tells it once per `QUIET_S`. Everything else goes the usual way."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._quiet_until = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message = str(context.get("message"))
        if _TRIES_AGAIN in message and isinstance(context.get("exception"), ValueError):
            return  # the listening socket was closed meanwhile: the server ends
        if message != _ACCEPT_FAILED:
            loop.default_exception_handler(context)
            return
        now = self._clock.monotonic()
        if now < self._quiet_until:
            return
        self._quiet_until = now + QUIET_S
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        logger.warning(
            "New connections have to wait: %s (limit of open files: %d)", context.get("exception"), limit
        )
