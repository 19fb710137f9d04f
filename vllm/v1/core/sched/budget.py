"""Tokens, seats and adapters that are left in one scheduling pass.

Owns the arithmetic of a pass.  Must not know queues or blocks.  Layer: L5 (scheduler).
"""

from __future__ import annotations

from vllm.v1.request import Request


class StepBudget:
    """What one pass may still hand out.

    ``tokens`` bounds the tokens scheduled, ``input_tokens`` the rows of the workers' input buffers, where every
    request with drafts takes ``draft_slots`` more rows. ``largest``: what the first request of a pass can get.
    """

    __slots__ = ("_draft_slots", "_lora_ids", "_max_loras", "input_tokens", "largest", "tokens")

    def __init__(self, tokens: int, input_tokens: int, draft_slots: int = 0, max_loras: int = 0) -> None:
        self.tokens = tokens
        self.input_tokens = input_tokens
        self._draft_slots = draft_slots
        self._max_loras = max_loras
        self._lora_ids: dict[int, int] = {}
        self.largest = self.limit()

    def limit(self) -> int:
        """The most tokens the next request can get."""
        return max(0, min(self.tokens, self.input_tokens - self._draft_slots))

    def spend(self, num_tokens: int) -> None:
        """Take the tokens of one scheduled request."""
        self.tokens -= num_tokens
        self.input_tokens -= num_tokens + self._draft_slots

    def refund(self, num_tokens: int) -> None:
        """Give back what :meth:`spend` took."""
        self.tokens += num_tokens
        self.input_tokens += num_tokens + self._draft_slots

    def allows_lora(self, request: Request) -> bool:
        """True if the request's adapter is in the step already or one more fits."""
        lora = request.lora_request
        if lora is None or self._max_loras == 0:
            return True
        return lora.lora_int_id in self._lora_ids or len(self._lora_ids) < self._max_loras

    def add_lora(self, request: Request) -> None:
        """Count the request's adapter as part of the step."""
        lora = request.lora_request
        if lora is not None:
            self._lora_ids[lora.lora_int_id] = self._lora_ids.get(lora.lora_int_id, 0) + 1

    def remove_lora(self, request: Request) -> None:
        """Undo :meth:`add_lora`; the adapter leaves with its last request."""
        lora = request.lora_request
        if lora is None or lora.lora_int_id not in self._lora_ids:
            return
        self._lora_ids[lora.lora_int_id] -= 1
        if self._lora_ids[lora.lora_int_id] == 0:
            del self._lora_ids[lora.lora_int_id]
