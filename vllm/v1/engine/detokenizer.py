"""Token ids → text, one request at a time.  Layer L7.

Owns the text produced so far, the search for stop strings and the decision how much of the text may be shown.
Must not know sampling, the core, or how outputs travel. Two promises hold however the tokens are split over calls:
the text shown never contains half a character, and only text that can no longer become a stop string is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The decoding window is cut back to CONTEXT_TOKENS once it holds WINDOW_TOKENS: decoding stays O(1) per token.
CONTEXT_TOKENS = 6
WINDOW_TOKENS = 16
# A character has at most four bytes, so at most three bytes of it can be outstanding. A window in which nothing became
# readable for this many tokens holds bytes that are no text: they are shown as U+FFFD instead of being kept for ever.
UNREADABLE_TOKENS_MAX = 48
PENDING_BYTES_MAX = 3


class TokenStream:
    """Decodes a growing list of token ids piece by piece; `push` returns the text that became certain.

    The stream starts behind a prompt: its last tokens are context only and never part of what is returned.
    """

    def __init__(
        self, tokenizer: Any, prompt_token_ids: Sequence[int] | None, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window = self._context_of(list((prompt_token_ids or [])[-4 * WINDOW_TOKENS :]))
        text = self._decode(self._window)
        self._shown = len(text.rstrip(REPLACEMENT))
        # Text of a character that the prompt left incomplete: dropped if the output does not complete it.
        self._foreign = text[self._shown :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)
        return text

    def _context_of(self, token_ids: list[int]) -> list[int]:
        """The shortest useful tail of `token_ids`: readable, so that it does not begin inside a character."""
        for size in (CONTEXT_TOKENS, WINDOW_TOKENS):
            tail = token_ids[-size:]
            text = self._decode(tail).rstrip(REPLACEMENT)
            if text and REPLACEMENT not in text:
                return tail
        return token_ids

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is now complete ("" while a character is incomplete)."""
        self._window.append(token_id)
        text = self._decode(self._window)
        readable = len(text.rstrip(REPLACEMENT))
        if readable < len(text) and len(self._window) > UNREADABLE_TOKENS_MAX:
            readable = max(readable, len(text) - PENDING_BYTES_MAX)
        if self._foreign and readable > self._shown:
            self._skip_foreign(text)
        new_text = text[self._shown : readable]
        self._shown = max(self._shown, readable)
        if len(self._window) >= WINDOW_TOKENS and readable == len(text):
            self._shrink()
        return new_text

    def _skip_foreign(self, text: str) -> None:
        """The prompt's incomplete character was either completed (then it is shown) or abandoned (then it is not)."""
        if text.startswith(self._foreign, self._shown):
            self._shown += len(self._foreign)
        self._foreign = ""

    def _shrink(self) -> None:
        tail = self._window[-CONTEXT_TOKENS:]
        text = self._decode(tail)
        if text and REPLACEMENT not in text:
            self._window = tail
            self._shown = len(text)


class IncrementalDetokenizer:
    """Text side of one request. This base class keeps token ids only (`detokenize=False` or no tokenizer)."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.output_text = ""

    @classmethod
    def from_new_request(cls, tokenizer: Any | None, request: Any) -> IncrementalDetokenizer:
        """The right detokenizer for this `EngineCoreRequest`."""
        params = request.sampling_params
        if tokenizer is None or params is None or not params.detokenize:
            return IncrementalDetokenizer()
        return TextDetokenizer(tokenizer, request.prompt_token_ids, params)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids

    def num_output_tokens(self) -> int:
        return len(self.token_ids)

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Take new tokens; return the stop string they completed, if any.

        `stop_terminated`: the last of them ended the request (EOS or a stop token id).
        """
        self.token_ids.extend(new_token_ids)
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """The text that may be shown: all of it, or with `delta` what was not returned before."""
        return ""


class TextDetokenizer(IncrementalDetokenizer):
    """Detokenizer with text and stop strings."""

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int] | None, params: Any) -> None:
        super().__init__()
        self.stop: list[str] = [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
        self.include_stop_str_in_output: bool = params.include_stop_str_in_output
        self.min_tokens: int = params.min_tokens
        self._stream = TokenStream(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._returned = 0
        self._stopped = False

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """See the base class. Tokens behind a completed stop string are neither kept nor shown."""
        text_end = len(new_token_ids)
        if stop_terminated and not self.include_stop_str_in_output:
            text_end -= 1
        for index, token_id in enumerate(new_token_ids):
            self.token_ids.append(token_id)
            if index >= text_end:
                continue
            stop = self._append_text(self._stream.push(token_id))
            if stop is not None:
                return stop
        return None

    def _append_text(self, new_text: str) -> str | None:
        self.output_text += new_text
        if not new_text or not self.stop or len(self.token_ids) <= self.min_tokens:
            return None
        found = check_stop_strings(
            self.output_text, len(new_text), self.stop, self.include_stop_str_in_output
        )
        if found is None:
            return None
        stop, length = found
        if length != -1:
            self.output_text = self.output_text[:length]
        self._stopped = True
        return stop

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        end = len(self.output_text)
        if not finished and not self._stopped and not self.include_stop_str_in_output:
            end -= held_back_length(self.output_text, self.stop)
        if not delta:
            return self.output_text[:end]
        start, self._returned = self._returned, max(self._returned, end)
        return self.output_text[start:end]


def check_stop_strings(
    output_text: str, new_char_count: int, stop: Sequence[str], include_in_output: bool
) -> tuple[str, int] | None:
    """The stop string that the last `new_char_count` characters completed first, and where to cut the text.

    Returns None if there is none, else `(stop string, length to cut to)`; -1 means the text need not be cut. Of several
    the one that ends first wins, then the one named first: the result does not depend on how the text was split.
    """
    if not new_char_count or not stop:
        return None
    best: tuple[int, int] | None = None
    for order, string in enumerate(stop):
        start = output_text.find(string, max(0, len(output_text) - new_char_count - len(string) + 1))
        if start != -1 and (best is None or start + len(string) < best[0]):
            best = (start + len(string), order)
    if best is None:
        return None
    end, order = best
    length = end if include_in_output else end - len(stop[order])
    return stop[order], -1 if length >= len(output_text) else length


def held_back_length(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that a stop string begins with (but which is not a whole stop string)."""
    longest = 0
    for string in stop:
        for length in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:length]):
                longest = length
                break
    return longest
