"""Public facade: the error body. Layer: L8."""

from vllm.entrypoints.openai.errors import ErrorInfo, ErrorResponse

__all__ = ["ErrorInfo", "ErrorResponse"]
