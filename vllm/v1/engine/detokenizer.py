"""Token ids → text, one request at a time.  Layer L7.

Owns the text produced so far, the search for stop strings and the decision how much of the text may be shown.
Must not know sampling, the core, or how outputs travel. Two promises hold however the tokens are split over calls:
the text shown never contains half a character, and only text that can no longer become a stop string is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The decoding window is cut back to about CONTEXT_TOKENS once it holds WINDOW_TOKENS: decoding stays O(1) per token.
CONTEXT_TOKENS = 6
WINDOW_TOKENS = 16
PROMPT_CONTEXT_MAX = 64
# A character has at most four bytes, so at most three bytes of it can be outstanding. If nothing became readable for this
# many tokens, their bytes are no text: they are shown as U+FFFD instead of being kept for ever.
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
        prompt_tail = list((prompt_token_ids or [])[-PROMPT_CONTEXT_MAX:])
        self._window = self._clean_tail(prompt_tail) or prompt_tail
        # If the prompt ends inside a character, this is its text until the output has completed or abandoned that.
        self._prompt_text = self._decode(self._window)
        self._shown = self._complete_length(self._window)
        self._unreadable_tokens = 0

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)
        return text

    def _clean_tail(self, token_ids: list[int]) -> list[int] | None:
        """A short tail of `token_ids` that has text and does not begin inside a character; None if there is none.

        Of four neighbouring cuts one is between two characters, since a character has at most four tokens.
        """
        for size in (
            CONTEXT_TOKENS,
            WINDOW_TOKENS,
            2 * WINDOW_TOKENS,
            PROMPT_CONTEXT_MAX - PENDING_BYTES_MAX,
        ):
            for cut in range(size, size + 1 + PENDING_BYTES_MAX):
                tail = token_ids[-cut:]
                if self._is_clean(tail):
                    return tail
                if cut >= len(token_ids):
                    return None
        return None

    def _is_clean(self, token_ids: list[int]) -> bool:
        """Whether these tokens have text and are readable, but for a character that may be incomplete at their end."""
        return self._complete_length(token_ids) > 0

    def _complete_length(self, token_ids: list[int]) -> int:
        """Length of the text without a character that is incomplete at its end; 0 if it is not readable otherwise."""
        for end in range(len(token_ids), max(0, len(token_ids) - PENDING_BYTES_MAX - 1), -1):
            text = self._decode(token_ids[:end])
            if REPLACEMENT not in text:
                return len(text)
        return 0

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is now complete ("" while a character is incomplete)."""
        self._window.append(token_id)
        text = self._decode(self._window)
        readable = len(text.rstrip(REPLACEMENT))
        self._unreadable_tokens = self._unreadable_tokens + 1 if readable < len(text) else 0
        if self._unreadable_tokens > UNREADABLE_TOKENS_MAX:
            readable = max(readable, len(text) - PENDING_BYTES_MAX)
        if self._prompt_text and readable > self._shown:
            self._leave_prompt(text)
        new_text = text[self._shown : readable]
        self._shown = max(self._shown, readable)
        self._shrink(is_readable=readable == len(text))
        return new_text

    def _leave_prompt(self, text: str) -> None:
        """The prompt's incomplete character was either completed (then it is shown) or abandoned (then it is not)."""
        if text.startswith(self._prompt_text):
            self._shown = len(self._prompt_text)
        self._prompt_text = ""

    def _shrink(self, is_readable: bool) -> None:
        """Keep the window short: cut it between two characters, or anywhere in what is no text."""
        if is_readable and len(self._window) >= WINDOW_TOKENS:
            tail = self._clean_tail(self._window)
            if tail is not None:
                self._window, self._shown = tail, len(self._decode(tail))
        elif len(self._window) > PROMPT_CONTEXT_MAX + UNREADABLE_TOKENS_MAX:
            self._window = self._window[-CONTEXT_TOKENS:]
            self._shown = max(0, len(self._decode(self._window)) - PENDING_BYTES_MAX)


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
