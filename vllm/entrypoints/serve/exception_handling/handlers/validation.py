"""Public facade: the handler of bodies that do not fit their schema. Layer: L8."""

from vllm.entrypoints.openai.errors import validation_exception_handler

__all__ = ["validation_exception_handler"]
