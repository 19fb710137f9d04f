"""Records of the public interface for parts that this engine does not run: encoder transfer, diffusion, reasoning. Layer: L1.

They keep whatever outside code puts in. `config/refusals.py` refuses to start an engine with one of them.
"""

from __future__ import annotations

from typing import Any


class _OpenRecord:
    """Holds the given values as attributes; nothing here reads them."""

    # Values of features that are unknown here.
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"


class ECTransferConfig(_OpenRecord):
    """Transfer of encoder caches between engines."""


class DiffusionConfig(_OpenRecord):
    """Block-wise diffusion decoding."""


class ReasoningConfig(_OpenRecord):
    """Markers of the reasoning part of an answer."""
