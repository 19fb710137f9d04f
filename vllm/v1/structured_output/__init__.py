"""Constrained generation: grammar state per request.  Re-exports only.  Layer: L5 (scheduler)."""

from vllm.v1.structured_output.manager import StructuredOutputManager, validate_structured_outputs

__all__ = ["StructuredOutputManager", "validate_structured_outputs"]
