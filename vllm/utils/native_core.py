"""The native half of the KV core, `vllm._kv_core`, or None where it is not built or not wanted. Layer: L0.

Owns loading it and the shape of what it offers. What each function does is told by its reference in Python, which the
users of this module hold and fall back to; both are tested against each other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol, cast

from vllm import envs
from vllm.logger import init_logger

logger = init_logger(__name__)


class NativeCore(Protocol):
    """Blocks and queues are those of the module itself: opaque here, typed by the users."""

    KVCacheBlock: Any
    FreeQueue: Any
    Index: Any
    Tally: Any

    def make_blocks(self, count: int, pool: object, /) -> list[Any]: ...
    def bind_take(
        self, queue: object, index: object, tally: object, further_keys: object, /
    ) -> Callable[[int], list[Any] | None]: ...
    def touch(self, pool: object, queue: object, blocks: object, /) -> list[Any] | None: ...
    def release(
        self, pool: object, blocks: object, cached: list[Any], uncached: list[Any], /
    ) -> list[Any] | None: ...
    def bind_find_cached(
        self, queue: object, suffixes: object, unwanted: object, index: object, coming: object, /
    ) -> Callable[[int], tuple[list[Any], list[Any], bytes, int, Any]]: ...
    def lacking(self, index: object, hashes: object, /) -> list[Any]: ...
    def pack_block_ids(self, blocks: object, /) -> bytes: ...
    def pack_token_counts(self, blocks: object, /) -> bytes: ...
    def count_before(self, queue: object, limit: int, hashes: object, /) -> int: ...
    def hash_chain(
        self, parent: bytes, tokens: object, block_size: int, is_cbor: bool, /
    ) -> list[bytes] | None: ...
    def select_portable_sha256(self, portable: bool, /) -> None: ...


_OFFERS = {name for name in {**vars(NativeCore), **NativeCore.__annotations__} if not name.startswith("_")}


def load_native_core() -> NativeCore | None:
    """The module, or None with a notice of why not."""
    if envs.VLLM_NO_NATIVE:
        logger.info_once("VLLM_NO_NATIVE is set: the KV core runs in Python")
        return None
    try:
        module = importlib.import_module("vllm._kv_core")
    except ImportError as error:
        logger.warning_once("The native KV core is not built (%s); the slower Python one is used", error)
        return None
    lacking = sorted(name for name in _OFFERS if not hasattr(module, name))
    if lacking:
        logger.warning_once(
            "The native KV core was built from other sources (it lacks %s); the slower Python one is used. "
            "`make setup` builds it again",
            ", ".join(lacking),
        )
        return None
    return cast(NativeCore, module)


native_core = load_native_core()
