"""Tokenizers behind one protocol.  Layer L7.

Owns how a tokenizer is found and opened: `tokenizer.json` or the metadata of a GGUF file straight through the
`tokenizers` library, everything else through transformers. Must not know requests, streaming or chat rendering.
Tokenizers here are never changed after they were opened, so one object may be used from several threads at once.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from vllm.logger import init_logger
from vllm.transformers_utils.config import find_gguf_file
from vllm.transformers_utils.gguf_metadata import read_gguf_header
from vllm.transformers_utils.tokenizer_gguf import tokenizer_from_gguf

logger = init_logger(__name__)

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
# Characters up to which a text is encoded with the interpreter's lock held, which is quicker.
SHORT_TEXT_MAX = 2048
SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@runtime_checkable
class TokenizerLike(Protocol):
    """What the engine asks of a tokenizer; Hugging Face tokenizers satisfy it as well."""

    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def all_special_ids(self) -> list[int]: ...
    @property
    def vocab_size(self) -> int: ...
    def __len__(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str: ...
    def get_vocab(self) -> dict[str, int]: ...
    def convert_ids_to_tokens(self, ids: Any) -> Any: ...
    def convert_tokens_to_ids(self, tokens: Any) -> Any: ...


class TokenizerOutput(dict[str, list[int]]):
    """Result of calling a tokenizer; `input_ids` as item and as attribute."""

    @property
    def input_ids(self) -> list[int]:
        return self["input_ids"]


class FastTokenizer:
    """A `tokenizers.Tokenizer` together with what `tokenizer_config.json` says about it.

    `chat_template` is the raw template (a string, a name → template mapping, or None); rendering is not done here.
    """

    is_fast = True

    def __init__(self, backend: Any, config: dict[str, Any], name_or_path: str = "") -> None:
        self.backend_tokenizer = backend
        self.name_or_path = name_or_path
        self.init_kwargs = config
        self.chat_template: str | dict[str, str] | None = config.get("chat_template")
        self.model_max_length = int(min(config.get("model_max_length") or 2**31, 2**31))
        self.special_tokens_map = _special_tokens(config)
        backend.no_padding()
        backend.no_truncation()
        self._mark_special(config)
        decoder: dict[int, Any] = backend.get_added_tokens_decoder()
        self.all_special_ids: list[int] = sorted(i for i, token in decoder.items() if token.special)
        self.added_tokens_decoder = decoder
        self._vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        # None: a normalizer may shorten the text, so its length says nothing.
        self.longest_token = max(map(len, self._vocab), default=1) if backend.normalizer is None else None
        self._token_ids = {token: self._vocab.get(token) for token in self.special_tokens_map.values()}
        self.max_token_id = max(self._vocab.values(), default=-1)
        self._add_bos, self._add_eos = self._bos_eos_rules(config)

    def _mark_special(self, config: dict[str, Any]) -> None:
        """Tell the backend which of its tokens are special according to the configuration."""
        names = list(self.special_tokens_map.values())
        names += [_token_text(token) for token in config.get("additional_special_tokens") or []]
        added = config.get("added_tokens_decoder") or {}
        names += [entry["content"] for entry in added.values() if entry.get("special")]
        known = [
            name for name in dict.fromkeys(names) if self.backend_tokenizer.token_to_id(name) is not None
        ]
        if known:
            self.backend_tokenizer.add_special_tokens(known)

    def _bos_eos_rules(self, config: dict[str, Any]) -> tuple[bool | None, bool | None]:
        """Whether `encode` must put BOS in front / EOS behind (True), take it away (False) or trust the backend."""
        add_bos = config.get("add_bos_token") if self.bos_token_id is not None else None
        add_eos = config.get("add_eos_token") if self.eos_token_id is not None else None
        return add_bos, add_eos

    # -- special tokens ------------------------------------------------------------------------------------------

    def _special(self, name: str) -> str | None:
        return self.special_tokens_map.get(name)

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self._token_ids[token]

    @property
    def bos_token(self) -> str | None:
        return self._special("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._special("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self._special("pad_token")

    @property
    def unk_token(self) -> str | None:
        return self._special("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._special_id("pad_token")

    @property
    def all_special_tokens(self) -> list[str]:
        return [self.added_tokens_decoder[i].content for i in self.all_special_ids]

    # -- vocabulary ----------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Size of the base vocabulary, without added tokens."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        return self._vocab

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: i for i, token in self.added_tokens_decoder.items()}

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Vocabulary entries of these ids; None for an id outside the vocabulary."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(i) for i in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            return self._vocab.get(tokens)
        return [self._vocab.get(token) for token in tokens]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        decoder = self.backend_tokenizer.decoder
        return decoder.decode(list(tokens)) if decoder is not None else " ".join(tokens)

    # -- text ⇄ ids ----------------------------------------------------------------------------------------------

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> list[int]:
        """Token ids of `text`. With `truncation`, the first `max_length` of them."""
        ids = self._encode(text, add_special_tokens)
        if add_special_tokens:
            ids = self._apply_bos_eos(ids, text)
        if truncation and max_length is not None and max_length >= 0:
            ids = ids[:max_length]
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """What the backend makes of `text`. Only its batch call lets other threads run meanwhile."""
        if len(text) <= SHORT_TEXT_MAX:
            encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            (encoding,) = self.backend_tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        ids: list[int] = encoding.ids
        return ids

    def _apply_bos_eos(self, ids: list[int], text: str) -> list[int]:
        bos, eos = self.bos_token_id, self.eos_token_id
        if self._add_bos is True and (not ids or ids[0] != bos):
            ids = [bos, *ids]  # type: ignore[list-item]
        elif self._add_bos is False and ids and ids[0] == bos and not text.startswith(self.bos_token or "\0"):
            ids = ids[1:]
        if self._add_eos is True and (not ids or ids[-1] != eos):
            ids = [*ids, eos]  # type: ignore[list-item]
        return ids

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> TokenizerOutput:
        return TokenizerOutput(input_ids=self.encode(text, add_special_tokens, **kwargs))

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of these ids; ids outside the vocabulary give nothing, incomplete characters give U+FFFD."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        text: str = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def batch_decode(
        self, sequences: Iterable[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str | None:
        """The template to use: an explicit name or text, `tool_use` when tools are given, else the default."""
        own = self.chat_template
        if isinstance(own, dict):
            if chat_template is not None:
                return own.get(chat_template, chat_template)
            return own.get("tool_use", own.get("default")) if tools else own.get("default")
        return chat_template or own


def characters_at_most(tokenizer: Any, tokens: int) -> int | None:
    """A length that no text of `tokens` tokens exceeds; None if the tokenizer does not tell.

    Characters of a byte-level vocabulary stand for bytes, of which a character has one or more.
    """
    if not isinstance(tokenizer, FastTokenizer) or tokenizer.longest_token is None:
        return None
    return tokens * tokenizer.longest_token


# -- opening ---------------------------------------------------------------------------------------------------------


def get_tokenizer(
    tokenizer_name: str | Path,
    *args: Any,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    **kwargs: Any,
) -> Any:
    """Open the tokenizer of a directory, a file inside one, or a Hugging Face repository id.

    `tokenizer_mode`: "auto" or "hf" take `tokenizer.json` where there is one, "slow" asks transformers for the
    Python implementation. Raises ValueError naming the place and what was missing.
    """
    name = str(tokenizer_name)
    if tokenizer_mode not in ("auto", "hf", "slow"):
        raise ValueError(f"tokenizer_mode={tokenizer_mode!r} must be one of 'auto', 'hf', 'slow'")
    if tokenizer_mode != "slow":
        file = find_file(name, TOKENIZER_FILE, revision, download_dir)
        if file is not None:
            return open_fast(file, name, revision, download_dir)
        gguf_file = find_gguf_file(name)
        if gguf_file is not None:
            return FastTokenizer(*tokenizer_from_gguf(read_gguf_header(gguf_file).metadata, name), name)
    return _open_with_transformers(name, tokenizer_mode, trust_remote_code, revision, download_dir, kwargs)


def tokenizer_from_config(model_config: Any) -> Any | None:
    """The tokenizer a `ModelConfig` names; None with `skip_tokenizer_init`."""
    if model_config is None or model_config.skip_tokenizer_init:
        return None
    return get_tokenizer(
        model_config.tokenizer or model_config.model,
        tokenizer_mode=model_config.tokenizer_mode,
        trust_remote_code=model_config.trust_remote_code,
        revision=model_config.tokenizer_revision,
    )


def open_fast(
    file: Path, name: str, revision: str | None = None, download_dir: str | None = None
) -> FastTokenizer:
    """A `FastTokenizer` from a `tokenizer.json` and the configuration files that stand beside it."""
    library = importlib.import_module("tokenizers")
    try:
        backend = library.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for any defect of the file
        raise ValueError(f"tokenizer {name!r}: {file} cannot be read: {error}") from error
    config = _read_json(find_file(name, CONFIG_FILE, revision, download_dir))
    special = _read_json(find_file(name, "special_tokens_map.json", revision, download_dir))
    config = {**special, **{key: value for key, value in config.items() if value is not None}}
    template = find_file(name, "chat_template.jinja", revision, download_dir)
    if template is not None:
        config["chat_template"] = template.read_text(encoding="utf-8")
    templates = config.get("chat_template")
    if isinstance(templates, list):
        config["chat_template"] = {entry["name"]: entry["template"] for entry in templates}
    return FastTokenizer(backend, config, name)


def find_file(
    name: str, filename: str, revision: str | None = None, download_dir: str | None = None
) -> Path | None:
    """Path of one file of a local directory or of a Hugging Face repository; None if it has no such file."""
    path = Path(name).expanduser()
    if path.is_file():
        path = path.parent
    if path.is_dir():
        return path / filename if (path / filename).is_file() else None
    if path.is_absolute() or name.count("/") > 1:
        raise ValueError(f"tokenizer {name!r} is neither a directory nor a Hugging Face repository id")
    return _find_in_repository(name, filename, revision, download_dir)


def _find_in_repository(
    name: str, filename: str, revision: str | None, download_dir: str | None
) -> Path | None:
    hub = importlib.import_module("huggingface_hub")
    errors = importlib.import_module("huggingface_hub.errors")
    try:
        return Path(hub.hf_hub_download(name, filename, revision=revision, cache_dir=download_dir))
    except (errors.EntryNotFoundError, errors.LocalEntryNotFoundError, OSError):
        return None


def _open_with_transformers(
    name: str,
    mode: str,
    trust_remote_code: bool,
    revision: str | None,
    download_dir: str | None,
    kwargs: dict[str, Any],
) -> Any:
    logger.info("Tokenizer %s has no %s; opening it through transformers.", name, TOKENIZER_FILE)
    transformers = importlib.import_module("transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(
            name,
            use_fast=mode != "slow",
            trust_remote_code=trust_remote_code,
            revision=revision,
            cache_dir=download_dir,
            **kwargs,
        )
    except Exception as error:  # transformers raises whatever the model's own code raises
        raise ValueError(f"no tokenizer can be opened from {name!r}: {error}") from error


def _read_json(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _token_text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    return {name: _token_text(config[name]) for name in SPECIAL_TOKEN_NAMES if config.get(name)}
