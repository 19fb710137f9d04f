"""What belongs into a slot: fingerprints of exact prefixes, and the pure function that is the model.

A fingerprint names salt, adapter, encoder input and every token up to a position, so two prefixes share one only if they are equal.
The next token depends on the fingerprint of the visible context and on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MASK = (1 << 61) - 1
_PRIME = 0x9E3779B97F4A7C15
EOS = 0
ALPHABET = 3
"""Tokens 1..ALPHABET are ordinary ones; few, so that continuations coincide often."""
NONSENSE = 99
"""What the model says if it read wrong bytes. No answer contains it."""


def extend(fingerprint: int, token: int) -> int:
    """The fingerprint of the prefix with one more token."""
    mixed = (fingerprint ^ (token + 0x51)) * _PRIME
    return (mixed ^ (mixed >> 29)) & _MASK


def root(salt: str | None, adapter: str | None, encoder: str | None = None) -> int:
    """The fingerprint of the empty prefix; what an encoder has read is part of every prefix."""
    value = 7
    for char in f"{salt or ''}|{adapter or ''}" + (f"|{encoder}" if encoder else ""):
        value = extend(value, ord(char))
    return value


def next_token(fingerprint: int) -> int:
    """What the model says after this context."""
    if (fingerprint >> 17) % 7 == 0:
        return EOS
    return 1 + (fingerprint >> 7) % ALPHABET


def guess_tokens(fingerprint: int, count: int) -> list[int]:
    """What a drafter says comes next: mostly what the model says, now and then something else."""
    guesses = []
    for _ in range(count):
        token = next_token(fingerprint)
        guesses.append(1 + token % ALPHABET if (fingerprint >> 23) % 4 == 0 else token)
        fingerprint = extend(fingerprint, guesses[-1])
    return guesses


def in_group(fingerprint: int, group: int) -> int:
    """The stamp that a group keeps for a fingerprint; groups differ, so that swapped groups are noticed."""
    return (fingerprint + (group + 1) * _PRIME) & _MASK


@dataclass
class Chain:
    """Tokens and the fingerprints of all their prefixes; `prints[n]` covers the first n tokens."""

    start: int
    tokens: list[int] = field(default_factory=list)
    prints: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prints = [self.start]
        tokens, self.tokens = self.tokens, []
        for token in tokens:
            self.append(token)

    def followed_by(self, tokens: list[int]) -> Chain:
        """A longer chain; this one stays as it is."""
        longer = Chain(self.start)
        longer.tokens, longer.prints = list(self.tokens), list(self.prints)
        for token in tokens:
            longer.append(token)
        return longer

    def append(self, token: int) -> None:
        """Add one token."""
        self.tokens.append(token)
        self.prints.append(extend(self.prints[-1], token))


def expected_output(chain: Chain, max_tokens: int, max_model_len: int, ignore_eos: bool) -> list[int]:
    """What a run without cache, offload and faults answers to the tokens of `chain`; extends the chain by it."""
    output: list[int] = []
    while True:
        token = next_token(chain.prints[-1])
        chain.append(token)
        output.append(token)
        if token == EOS and not ignore_eos:
            return output
        if len(output) >= max_tokens or len(chain.tokens) >= max_model_len:
            return output
