"""Errors the engine's front end raises to its callers.  Layer L7 (no first-party imports).

Owns the difference between "this request failed" and "the core is gone".  Knows nothing of HTTP.
"""

ENGINE_DEAD_MESSAGE = (
    "The engine core has stopped because of an unrecoverable error; see the log above for the root cause."
)
CLIENT_MESSAGE = "The engine is not available right now. Please try again later."


class EngineGenerateError(Exception):
    """One `generate` call failed; the engine itself goes on. Recoverable."""


class UtilityRefusedError(RuntimeError):
    """A control call that cannot be carried out as it was made: the caller's fault, nothing has changed."""


class EngineStartError(RuntimeError):
    """The engine core could not start. Its own log tells the cause; the message names it."""


class EngineDeadError(Exception):
    """The engine core is gone; no request can be served any more. Not recoverable.

    `suppress_context` drops the chained exception (a socket error says nothing about the cause).
    """

    ENGINE_DEAD_MESSAGE = ENGINE_DEAD_MESSAGE
    CLIENT_MESSAGE = CLIENT_MESSAGE

    def __init__(self, *args: object, suppress_context: bool = False) -> None:
        super().__init__(*(args or (ENGINE_DEAD_MESSAGE,)))
        self.__suppress_context__ = suppress_context
