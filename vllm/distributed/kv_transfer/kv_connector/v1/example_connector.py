"""A small, complete connector: prompt prefixes as files in a shared folder, loaded and saved synchronously.

It shows the synchronous side of the contract. One folder per model and prompt prefix, one file per layer; a
folder gets its name only when it is complete, so nobody ever loads half a prefix. What cannot be read is a
failed load, what cannot be written is not stored. One KV cache group and one worker only. It must not be fast.
Layer L6.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.torch
import torch

from vllm.config import VllmConfig
from vllm.distributed.kv_event_types import MEDIUM_STORAGE
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.example_holds import FolderHolds
from vllm.logger import init_logger
from vllm.utils.math_utils import round_down
from vllm.v1.core.block_hash import ExtraKeys
from vllm.v1.core.block_hasher import generate_block_hash_extra_keys
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_report import ExternalHit
from vllm.v1.request import Request, RequestStatus
from vllm.v1.simple_kv_offload.copy_backends.kv_digest import weight_facts

logger = init_logger(__name__)

STORAGE_KEY = "shared_storage_path"
DEFAULT_STORAGE_PATH = "/tmp"
TENSOR_NAME = "kv"
# A file that is gone, cut short, or holds something else.
LOAD_ERRORS: Final = (OSError, safetensors.SafetensorError, KeyError, RuntimeError)


@dataclass
class ReqMeta:
    """One prefix to load or to store; ``slot_mapping[i]`` is the cache slot of token i.

    ``extra_keys``: what besides tokens and media its content depends on, such as a cache salt.
    ``held``: the name of a folder that holds its files for this load.
    """

    token_ids: list[int]
    slot_mapping: list[int]
    is_store: bool
    mm_hashes: list[str]
    extra_keys: ExtraKeys = field(default=(), kw_only=True)
    held: str = field(default="", kw_only=True)

    @classmethod
    def make(
        cls,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        block_size: int,
        is_store: bool,
        mm_hashes: Sequence[str],
        extra_keys: ExtraKeys = (),
    ) -> ReqMeta:
        """The whole blocks of a prompt that lie before its last token."""
        num_tokens = aligned_length(len(token_ids), block_size)
        slots = [
            block_ids[position // block_size] * block_size + position % block_size
            for position in range(num_tokens)
        ]
        return cls(list(token_ids[:num_tokens]), slots, is_store, list(mm_hashes), extra_keys=extra_keys)


@dataclass
class ExampleConnectorMetadata(KVConnectorMetadata):
    """The prefixes of this step; ``withdrawn``: patterns of the names of folders that go first."""

    requests: list[ReqMeta] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list, kw_only=True)

    def add_request(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        block_size: int,
        is_store: bool,
        mm_hashes: Sequence[str] = (),
        extra_keys: ExtraKeys = (),
        held: str = "",
    ) -> None:
        """Append one prefix."""
        request = ReqMeta.make(token_ids, block_ids, block_size, is_store, mm_hashes, extra_keys)
        request.held = held
        self.requests.append(request)


@dataclass(slots=True)
class _Prompt:
    """A prompt on its way to being stored: it is complete once so many tokens are computed."""

    token_ids: list[int]
    block_ids: list[int]
    mm_hashes: list[str]
    extra_keys: ExtraKeys


class ExampleConnector(KVConnectorBase_V1):
    """Keeps prompt prefixes below ``kv_connector_extra_config["shared_storage_path"]``."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        block_size = vllm_config.cache_config.block_size
        if block_size is None:
            raise ValueError("ExampleConnector needs cache_config.block_size")
        self.check_config(vllm_config)
        self._block_size = block_size
        self._storage = Path(
            self._kv_transfer_config.get_from_extra_config(STORAGE_KEY, DEFAULT_STORAGE_PATH)
        )
        self._to_load: dict[str, Request] = {}
        self._to_store: dict[str, _Prompt] = {}
        # Of admitted requests that have any: a step's record does not carry them.
        self._extra_keys: dict[str, ExtraKeys] = {}
        self._kv_caches: dict[str, torch.Tensor] = {}
        # Folder of a prefix → the temporary folder its layers are collected in.
        self._collecting: dict[Path, Path] = {}
        # Folders that could not be written in this step.
        self._given_up: set[Path] = set()
        self._failed_blocks: set[int] = set()
        model = vllm_config.model_config
        self._model: tuple[object, ...] = ()
        if model is not None:
            self._model = (model.model, model.revision, str(model.dtype), *_weights_of(vllm_config))
        self._prefix = f"{_digest(self._model)[:16]}-"
        # Patterns that the worker half has not been told, and what may not be found though it is still there.
        self._withdrawing: list[str] = []
        self._withdrawn: dict[Path, tuple[int, int] | None] = {}
        # Other engines reset the folder when they like: what was promised to a request is held until it is loaded.
        self._holds = FolderHolds(self._storage, vllm_config.max_concurrent_batches + 1)
        if role is KVConnectorRole.SCHEDULER:
            self._holds.remove_orphans()

    @classmethod
    def check_config(cls, vllm_config: VllmConfig) -> None:
        if vllm_config.parallel_config.world_size > 1:
            # The ranks' shards would share one name.
            raise ValueError(
                f"ExampleConnector works with one worker, got world_size={vllm_config.parallel_config.world_size}"
            )
        transfer_config = vllm_config.kv_transfer_config
        extra = {} if transfer_config is None else transfer_config.kv_connector_extra_config
        for key in extra:
            if key != STORAGE_KEY:
                hint = (
                    f" (did you mean {STORAGE_KEY!r}?)" if get_close_matches(str(key), [STORAGE_KEY]) else ""
                )
                raise ValueError(
                    f"Unknown key in kv_connector_extra_config of ExampleConnector: {key!r}{hint}"
                )
        path = extra.get(STORAGE_KEY, DEFAULT_STORAGE_PATH)
        if not isinstance(path, str) or not path:
            raise ValueError(f"{STORAGE_KEY} must name a folder, got {path!r}")

    # -- worker half --------------------------------------------------------------------------

    # Forward contexts and attention metadata are opaque in the connector contract.
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._kv_caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request in self._requests(is_store=False):
            folder = self._folder(request.token_ids, request.mm_hashes, request.extra_keys)
            source = self._storage / request.held if request.held else folder
            blocks = self._blocks(request)
            try:
                for layer_name, cache in self._kv_caches.items():
                    saved = safetensors.torch.load_file(str(source / f"{layer_name}.safetensors"))[
                        TENSOR_NAME
                    ]
                    cache[blocks.to(cache.device)] = saved.to(cache.device)
            except LOAD_ERRORS as error:
                logger.error("ExampleConnector: %s cannot be loaded and is removed: %s", folder, error)
                shutil.rmtree(folder, ignore_errors=True)
                self._failed_blocks.update(blocks.tolist())
            if request.held:
                shutil.rmtree(source, ignore_errors=True)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        # What a step that failed has left is not complete.
        for folder in list(self._collecting):
            self._discard(folder)
        self._given_up.clear()
        self.apply_withdrawal(connector_metadata)

    def apply_withdrawal(self, withdrawal: KVConnectorMetadata) -> str | None:
        problem = None
        patterns = withdrawal.withdrawn if isinstance(withdrawal, ExampleConnectorMetadata) else ()
        for folder in [folder for pattern in patterns for folder in sorted(self._storage.glob(pattern))]:
            gone = folder.with_name(f"removed-{os.getpid()}-{folder.name}")
            try:
                os.rename(folder, gone)  # nobody ever finds half of it
                shutil.rmtree(gone, ignore_errors=True)
            except FileNotFoundError:
                continue  # another engine was faster
            except OSError as error:
                problem = f"{folder} cannot be removed: {error}"
                logger.error("ExampleConnector: %s", problem)
        return problem

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over when ``start_load_kv`` returns."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        for request in self._requests(is_store=True):
            folder = self._folder(request.token_ids, request.mm_hashes, request.extra_keys)
            if folder in self._given_up or folder.exists():
                continue
            pages = kv_layer[self._blocks(request).to(kv_layer.device)].detach().cpu().contiguous()
            try:
                if folder not in self._collecting:
                    self._storage.mkdir(parents=True, exist_ok=True)
                    self._collecting[folder] = Path(tempfile.mkdtemp(dir=self._storage))
                file = self._collecting[folder] / f"{layer_name}.safetensors"
                safetensors.torch.save_file({TENSOR_NAME: pages}, str(file))
            except (OSError, safetensors.SafetensorError) as error:
                logger.error("ExampleConnector: %s cannot be stored: %s", folder, error)
                self._given_up.add(folder)
                self._discard(folder)

    def _discard(self, folder: Path) -> None:
        temporary = self._collecting.pop(folder, None)
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)

    def wait_for_save(self) -> None:
        collecting, self._collecting = self._collecting, {}
        for folder, temporary in collecting.items():
            try:
                os.rename(temporary, folder)
            except OSError:
                # Another engine stored the same prefix meanwhile; either copy is right.
                shutil.rmtree(temporary, ignore_errors=True)

    def _requests(self, is_store: bool) -> Iterable[ReqMeta]:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, ExampleConnectorMetadata):
            raise TypeError(f"expected ExampleConnectorMetadata, got {type(metadata).__name__}")
        return [request for request in metadata.requests if request.is_store == is_store]

    def _blocks(self, request: ReqMeta) -> torch.Tensor:
        return torch.tensor([slot // self._block_size for slot in request.slot_mapping[:: self._block_size]])

    # -- scheduler half -----------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_tokens, folder = self._look_up(request, num_computed_tokens)
        if folder is None or not self._holds.take(request.request_id, folder):
            self._holds.drop(request.request_id)
            return 0, False
        return num_tokens, False

    def _look_up(self, request: Request, num_computed_tokens: int) -> tuple[int, Path | None]:
        """Tokens behind the computed ones that are stored, and where."""
        if not request.load_tiers.allows(MEDIUM_STORAGE):
            return 0, None
        token_ids, mm_hashes = _prompt_of(request)
        num_tokens = aligned_length(len(token_ids), self._block_size)
        extra_keys = _extra_keys_of(request, num_tokens)
        if num_tokens <= num_computed_tokens or not self._is_stored(token_ids, mm_hashes, extra_keys):
            return 0, None
        return num_tokens - num_computed_tokens, self._folder(token_ids[:num_tokens], mm_hashes, extra_keys)

    def peek_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalHit | None:
        tokens = {self._cache_hit_source: self._look_up(request, num_computed_tokens)[0]}
        return ExternalHit(tokens, tokens, False)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        num_tokens = aligned_length(len(request.prompt_token_ids or ()), self._block_size)
        extra_keys = _extra_keys_of(request, num_tokens)
        if extra_keys:
            self._extra_keys[request.request_id] = extra_keys
        if num_external_tokens > 0:
            self._to_load[request.request_id] = request
        else:
            self._holds.drop(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ExampleConnectorMetadata:
        metadata = ExampleConnectorMetadata(withdrawn=self._withdrawing)
        self._withdrawing = []
        self._holds.begin_step()
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            token_ids = list(new.prompt_token_ids or ())
            mm_hashes = [feature.identifier for feature in new.mm_features]
            block_ids = list(new.block_ids[0])
            extra_keys = self._extra_keys.get(new.req_id, ())
            # It starts again: what was noted of it names blocks that others may have now.
            self._to_store.pop(new.req_id, None)
            if self._to_load.pop(new.req_id, None) is not None:
                held = self._holds.hand_over(new.req_id)
                metadata.add_request(
                    token_ids, block_ids, self._block_size, False, mm_hashes, extra_keys, held
                )
            elif aligned_length(len(token_ids), self._block_size) and not self._is_stored(
                token_ids, mm_hashes, extra_keys
            ):
                self._to_store[new.req_id] = _Prompt(token_ids, block_ids, mm_hashes, extra_keys)
                self._store_if_complete(metadata, new.req_id, new.num_computed_tokens + scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, new_block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._follow(req_id, new_block_ids, req_id in cached.resumed_req_ids, metadata)
            self._store_if_complete(metadata, req_id, computed + scheduled[req_id])
        self._to_load.clear()
        return metadata

    def _follow(
        self,
        req_id: str,
        new_block_ids: tuple[list[int], ...] | None,
        is_resumed: bool,
        metadata: ExampleConnectorMetadata,
    ) -> None:
        """A known request goes on with more blocks, or with new ones and perhaps a load."""
        blocks = list(new_block_ids[0]) if new_block_ids is not None else []
        prompt = self._to_store.get(req_id)
        if prompt is not None:
            prompt.block_ids = blocks if is_resumed else prompt.block_ids + blocks
        request = self._to_load.pop(req_id, None)
        if request is not None:
            token_ids, mm_hashes = _prompt_of(request)
            extra_keys = self._extra_keys.get(req_id, ())
            held = self._holds.hand_over(req_id)
            metadata.add_request(token_ids, blocks, self._block_size, False, mm_hashes, extra_keys, held)

    def _store_if_complete(self, metadata: ExampleConnectorMetadata, req_id: str, num_computed: int) -> None:
        prompt = self._to_store.get(req_id)
        if prompt is None or num_computed < aligned_length(len(prompt.token_ids), self._block_size):
            return
        del self._to_store[req_id]
        metadata.add_request(
            prompt.token_ids, prompt.block_ids, self._block_size, True, prompt.mm_hashes, prompt.extra_keys
        )

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if request.status is RequestStatus.FINISHED_ERROR and not request.has_read_nothing:
            # Whatever was wrong, such as logits that are no numbers, what it read and wrote is suspect.
            token_ids, mm_hashes = _prompt_of(request)
            num_tokens = aligned_length(len(token_ids), self._block_size)
            folder = self._folder(token_ids[:num_tokens], mm_hashes, _extra_keys_of(request, num_tokens))
            self._withdraw(folder.name)
        self._holds.drop(request.request_id)
        self._to_load.pop(request.request_id, None)
        self._to_store.pop(request.request_id, None)
        self._extra_keys.pop(request.request_id, None)
        return False, None

    def shutdown(self) -> None:
        self._holds.shutdown()

    def reset_cache(self) -> bool | None:
        self._to_store.clear()
        self._holds.drop_all()
        self._withdraw(f"{self._prefix}*")
        return True

    def _withdraw(self, pattern: str) -> None:
        """Find these folders no more; they go behind the steps under way, which may read them or add some."""
        self._withdrawing.append(pattern)
        still_there = [folder for folder, found in self._withdrawn.items() if _identity(folder) == found]
        folders = [*still_there, *self._storage.glob(pattern)]
        self._withdrawn = {folder: _identity(folder) for folder in folders}

    def take_withdrawal(self) -> ExampleConnectorMetadata | None:
        withdrawn, self._withdrawing = self._withdrawing, []
        return ExampleConnectorMetadata(withdrawn=withdrawn) if withdrawn else None

    def _is_stored(self, token_ids: Sequence[int], mm_hashes: Sequence[str], extra_keys: ExtraKeys) -> bool:
        num_tokens = aligned_length(len(token_ids), self._block_size)
        if num_tokens == 0 or self._withdrawing:
            return False
        folder = self._folder(token_ids[:num_tokens], mm_hashes, extra_keys)
        found = _identity(folder)
        return found is not None and found != self._withdrawn.get(folder)

    def _folder(self, token_ids: Sequence[int], mm_hashes: Sequence[str], extra_keys: ExtraKeys) -> Path:
        content: tuple[object, ...] = (list(token_ids), list(mm_hashes))
        if extra_keys:
            content = (*content, extra_keys)
        return self._storage / f"{self._prefix}{_digest(content)}"


def _digest(content: tuple[object, ...]) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()


def _identity(folder: Path) -> tuple[int, int] | None:
    """What tells a folder from a later one of its name; None if there is none."""
    try:
        info = folder.stat()
    except OSError:
        return None
    return info.st_ino, info.st_ctime_ns


def _weights_of(vllm_config: VllmConfig) -> tuple[object, ...]:
    """What tells the weights of a local model from others under the same path; nothing if there are none to see."""
    model = vllm_config.model_config
    if model is None or not Path(model.model).expanduser().exists():
        return ()
    try:
        return tuple(weight_facts(vllm_config))
    except (ValueError, OSError):
        return ()


def aligned_length(num_tokens: int, block_size: int) -> int:
    """Whole blocks before the last token, in tokens: the last one is always computed."""
    return max(0, round_down(num_tokens - 1, block_size))


def _prompt_of(request: Request) -> tuple[list[int], list[str]]:
    return list(request.prompt_token_ids or ()), [feature.identifier for feature in request.mm_features]


def _extra_keys_of(request: Request, num_tokens: int) -> ExtraKeys:
    """What besides tokens and media makes the prompt's KV its own: adapter, salt, prompt embeddings."""
    keys, _ = generate_block_hash_extra_keys(request, 0, num_tokens, 0)
    return tuple(key for key in keys or () if key[0] != "mm")
