"""Public facade: keep-alive comments in event streams. Layer: L8."""

from vllm.entrypoints.openai.sse import SSE_KEEP_ALIVE_COMMENT, with_sse_keep_alive

__all__ = ["SSE_KEEP_ALIVE_COMMENT", "with_sse_keep_alive"]
