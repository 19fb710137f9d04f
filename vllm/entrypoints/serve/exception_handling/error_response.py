"""Public facade: from an exception or message to an error body. Layer: L8."""

from vllm.entrypoints.openai.errors import create_error_response

__all__ = ["create_error_response"]
