"""Logs requests and their outputs, cut to a length. Layer: L8."""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams

logger = init_logger(__name__)


class RequestLogger:
    """`max_log_len`: characters and token ids shown of each; None shows everything."""

    def __init__(self, *, max_log_len: int | None = None) -> None:
        self.max_log_len = max_log_len

    def log_inputs(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int] | None,
        params: SamplingParams | None,
    ) -> None:
        """Log a request as it arrives."""
        cut = self.max_log_len
        ids = prompt_token_ids if prompt_token_ids is None else prompt_token_ids[:cut]
        text = prompt if prompt is None else prompt[:cut]
        logger.info(
            "Received request %s: prompt=%r, prompt_token_ids=%s, params=%s", request_id, text, ids, params
        )

    def log_outputs(self, request_id: str, text: str, finish_reason: str | None, is_delta: bool) -> None:
        """Log what was sent back, whole or in part."""
        kind = "delta" if is_delta else "output"
        logger.info(
            "Request %s %s: %r, finish_reason=%s", request_id, kind, text[: self.max_log_len], finish_reason
        )
