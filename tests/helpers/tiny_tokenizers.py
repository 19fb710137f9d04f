"""Tiny real tokenizers made on the spot: byte-level BPE and SentencePiece-like BPE with byte fallback."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from vllm.transformers_utils.tokenizer import FastTokenizer

CORPUS = [
    "hello world the quick brown fox jumps over the lazy dog END stop",
    "Grüße aus Köln, naïve café — 你好世界 こんにちは 😀 👩‍👩‍👧 ñandú",
    '{"name": "value", "list": [1, 2, 3]}',
]
CONFIG: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
SPECIAL = ["<s>", "</s>", "<pad>"]


def byte_level(vocab_size: int = 330) -> Tokenizer:
    """Byte-level BPE: every byte is a token, so most non-ASCII characters need several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece-like: spaces are `▁`, unknown characters become byte tokens `<0xNN>`."""
    vocab = {token: index for index, token in enumerate(SPECIAL)}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for character in '▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,{}[]:"0123456789':
        vocab[character] = len(vocab)
    merges = []
    for left, right in [("▁", "h"), ("▁h", "e"), ("l", "l"), ("E", "N"), ("EN", "D"), ("▁", "w")]:
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token=None))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return tokenizer


@cache
def make_tokenizer(kind: str) -> FastTokenizer:
    """A tokenizer of kind "byte_level" or "byte_fallback"."""
    return FastTokenizer(
        {"byte_level": byte_level, "byte_fallback": byte_fallback}[kind](), dict(CONFIG), kind
    )


def save_tokenizer(kind: str, directory: Path, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer(kind).backend_tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **config}))
    return directory
