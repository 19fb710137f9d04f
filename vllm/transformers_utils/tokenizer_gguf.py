"""The tokenizer that a GGUF file carries in its metadata.  Layer L7.

Owns how `tokenizer.ggml.*` becomes a `tokenizers.Tokenizer`: byte-level BPE ("gpt2") and SentencePiece BPE ("llama"). Must
not know tensors. What cannot be rebuilt exactly is refused, for a tokenizer that is nearly right harms silently.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

_PREFIX = "tokenizer.ggml."
# Token types of the format.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TRIPLE_DIGITS = "|".join([_CONTRACTIONS, _WORDS, r"\p{N}{1,3}", _REST])
_SINGLE_DIGITS = "|".join([_CONTRACTIONS, _WORDS, r"\p{N}", _REST])
# How text is cut before merging, by `tokenizer.ggml.pre`. None: the cut of GPT-2.
_SPLITS: dict[str, str | None] = {
    "chatglm-bpe": _TRIPLE_DIGITS,
    "default": None,
    "glm4": _TRIPLE_DIGITS,
    "gpt-2": None,
    "llama-bpe": _TRIPLE_DIGITS,
    "llama-v3": _TRIPLE_DIGITS,
    "llama3": _TRIPLE_DIGITS,
    "qwen2": _SINGLE_DIGITS,
    "smollm": None,
}
# Kinds that also cut before and after every digit.
_DIGITS_APART = ("smollm",)


def tokenizer_from_gguf(metadata: dict[str, Any], name: str) -> tuple[Any, dict[str, Any]]:
    """The backend and the settings (special tokens, BOS and EOS rules, chat template) of a file's metadata.

    Raises ValueError naming the file and what is missing or unknown.
    """
    kind = metadata.get(_PREFIX + "model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise ValueError(
            f"{name}: tokenizers of kind tokenizer.ggml.model={kind!r} cannot be rebuilt (known: {', '.join(builders)}); "
            "name another tokenizer with --tokenizer"
        )
    tokens = metadata.get(_PREFIX + "tokens")
    if not tokens:
        raise ValueError(f"{name}: tokenizer.ggml.tokens is missing; name another tokenizer with --tokenizer")
    backend = builders[kind](metadata, tokens, name)
    _add_marked_tokens(backend, metadata, tokens)
    return backend, _settings(metadata, tokens)


def _byte_level(metadata: dict[str, Any], tokens: list[str], name: str) -> Any:
    library = importlib.import_module("tokenizers")
    pre = metadata.get(_PREFIX + "pre", "default")
    if pre not in _SPLITS:
        raise ValueError(
            f"{name}: the text split tokenizer.ggml.pre={pre!r} is not known (known: {', '.join(_SPLITS)}); name another "
            "tokenizer with --tokenizer"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get(_PREFIX + "merges", [])]
    backend = library.Tokenizer(library.models.BPE(vocab=_vocabulary(tokens), merges=merges))
    split = _SPLITS[pre]
    steps = [library.pre_tokenizers.Digits(individual_digits=True)] if pre in _DIGITS_APART else []
    if split is not None:
        steps.append(library.pre_tokenizers.Split(library.Regex(split), behavior="isolated"))
    steps.append(library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    backend.pre_tokenizer = library.pre_tokenizers.Sequence(steps)
    backend.decoder = library.decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], name: str) -> Any:
    library = importlib.import_module("tokenizers")
    scores = metadata.get(_PREFIX + "scores")
    if not scores or len(scores) != len(tokens):
        raise ValueError(
            f"{name}: tokenizer.ggml.scores must hold one score for each of {len(tokens)} tokens"
        )
    vocabulary = _vocabulary(tokens)
    model = library.models.BPE(
        vocab=vocabulary,
        merges=_merges_by_score(vocabulary, scores),
        unk_token=tokens[metadata.get(_PREFIX + "unknown_token_id", 0)],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = library.Tokenizer(model)
    normalizers, decoders = library.normalizers, library.decoders
    spaces = [normalizers.Replace(" ", "▁")]
    end_of_line = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(_PREFIX + "add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        end_of_line.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(end_of_line)
    return backend


def _merges_by_score(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every split of a token into two tokens; the better the whole token's score, the earlier it is merged."""
    ordered = sorted(vocabulary, key=lambda token: -scores[vocabulary[token]])
    return [merge for token in ordered for merge in _splits(token, vocabulary)]


def _splits(token: str, vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
    known = [half for half in halves if half[0] in vocabulary and half[1] in vocabulary]
    yield from sorted(known, key=lambda half: (vocabulary[half[0]], vocabulary[half[1]]))


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _add_marked_tokens(backend: Any, metadata: dict[str, Any], tokens: list[str]) -> None:
    library = importlib.import_module("tokenizers")
    types = metadata.get(_PREFIX + "token_type") or []
    for token, kind in zip(tokens, types, strict=False):
        marked = library.AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
        if kind in (_UNKNOWN, _CONTROL):
            backend.add_special_tokens([marked])
        elif kind == _USER_DEFINED:
            backend.add_tokens([marked])


def _settings(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {"chat_template": metadata.get("tokenizer.chat_template")}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"{_PREFIX}{theirs}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            settings[f"{ours}_token"] = tokens[token_id]
    # SentencePiece models begin with BOS unless the file says otherwise.
    is_sentencepiece = metadata.get(_PREFIX + "model") == "llama"
    settings["add_bos_token"] = metadata.get(_PREFIX + "add_bos_token", is_sentencepiece)
    settings["add_eos_token"] = metadata.get(_PREFIX + "add_eos_token", False)
    return settings
