"""The one tree of errors that the engine raises on purpose. Layer: L0.

An error knows the HTTP status it means, so that the front end maps all of them in one place.
"""

from __future__ import annotations


class VLLMError(Exception):
    """Root of the tree. `retryable`: the same request may succeed later; `parameter`: the field at fault, if one is."""

    http_status = 500
    retryable = False
    parameter: str | None = None


class VLLMClientError(VLLMError):
    """The request cannot be served as it is; the sender has to change it."""

    http_status = 400


class VLLMServerError(VLLMError):
    """The engine could not serve a correct request."""


class VLLMValidationError(VLLMClientError):
    """A value is not acceptable. `parameter` names the field, `value` is what was given. Not a `ValueError`."""

    def __init__(self, message: str, *, parameter: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.message = message
        self.parameter = parameter
        self.value = value

    def __str__(self) -> str:
        details = []
        if self.parameter is not None:
            details.append(f"parameter={self.parameter}")
        if self.value is not None:
            details.append(f"value={self.value!r}")
        return f"{self.message} ({', '.join(details)})" if details else self.message


class VLLMNotFoundError(VLLMClientError):
    """What the request names (a model, an adapter, a response) does not exist."""

    http_status = 404


class VLLMUnprocessableEntityError(VLLMClientError):
    """Well formed, but nothing can be done with it (for example a broken media file)."""

    http_status = 422


class VLLMNotImplementedError(VLLMClientError):
    """A part of the interface that this model or this build does not offer."""

    http_status = 501


class GenerationError(VLLMServerError):
    """Generation failed inside the engine."""

    def __init__(self, message: str = "Internal server error during generation") -> None:
        super().__init__(message)


class RetryableRequestError(GenerationError):
    """A passing failure: the same request may be sent again."""

    http_status = 503
    retryable = True


class GracefulHTTPError(VLLMError):
    """An expected refusal with its own HTTP status; logged without a stack trace."""

    def __init__(self, message: str, http_status: int = 503) -> None:
        super().__init__(message)
        self.message = message
        self.http_status = http_status


class QueueOverflowError(GracefulHTTPError):
    """`max_num_queued_reqs` requests wait already."""

    retryable = True


class MaxQueuedTokensError(GracefulHTTPError):
    """The waiting requests hold `max_num_queued_tokens` prompt tokens already."""

    retryable = True
