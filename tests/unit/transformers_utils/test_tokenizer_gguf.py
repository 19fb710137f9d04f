"""Tokenizers rebuilt from GGUF metadata equal the ones they came from."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.helpers.gguf_files import llama_metadata, write_gguf
from tests.helpers.tiny_tokenizers import CORPUS
from vllm.tokenizers import get_tokenizer
from vllm.transformers_utils.tokenizer_gguf import tokenizer_from_gguf

SPECIAL = ["<unk>", "<s>", "</s>"]
LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def trained(split: str | None) -> Tokenizer:
    """Byte-level BPE, cut like Llama 3 or like GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    cut = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator([*CORPUS, "year 2024 don't 12345"] * 3, trainer)
    return tokenizer


def byte_level_metadata(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }


def sentencepiece_metadata() -> tuple[Tokenizer, dict[str, Any]]:
    """A BPE whose merge order is that of falling scores, as SentencePiece has it."""
    pieces = ["▁", *"abcdefghilnorstw", "he", "ll", "▁w", "or", "hell", "▁wor", "▁hell", "the", "st"]
    tokens = [*SPECIAL, *[f"<0x{byte:02X}>" for byte in range(256)], *pieces]
    scores = [0.0] * 259 + [-float(index) for index in range(len(pieces))]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("▁", "w"),
        ("o", "r"),
        ("he", "ll"),
        ("▁w", "or"),
        ("▁", "hell"),
        ("t", "he"),
        ("s", "t"),
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


PAIRS = [
    (trained(None), "gpt-2"),
    (trained(LLAMA3_SPLIT), "llama-bpe"),
]
SPM = sentencepiece_metadata()


@given(text=st.text(st.sampled_from("helo wrd 'st1230\n  ñ你😀<s>"), max_size=30))
def test_rebuilt_tokenizers_equal_their_originals(text: str) -> None:
    for original, metadata in [(o, byte_level_metadata(o, pre)) for o, pre in PAIRS] + [SPM]:
        rebuilt, _ = tokenizer_from_gguf(metadata, "f")
        ids = rebuilt.encode(text, add_special_tokens=False).ids
        assert ids == original.encode(text, add_special_tokens=False).ids
        assert rebuilt.decode(ids, skip_special_tokens=False) == original.decode(
            ids, skip_special_tokens=False
        )


def test_a_gguf_file_opens_like_a_folder(tmp_path: Path) -> None:
    metadata = {**llama_metadata(), **byte_level_metadata(PAIRS[0][0], "gpt-2")}
    path = write_gguf(tmp_path / "model.gguf", metadata, {})
    for name in (path, tmp_path):
        tokenizer = get_tokenizer(name)
        assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == (
            "<s>",
            "</s>",
            "{{ messages }}",
        )
        assert tokenizer.encode("a", add_special_tokens=True)[0] != tokenizer.bos_token_id
        assert tokenizer.all_special_ids == [0, 1, 2]


def test_sentencepiece_models_begin_with_bos() -> None:
    _, settings = tokenizer_from_gguf(SPM[1], "f")
    assert settings["add_bos_token"] is True
    assert settings["add_eos_token"] is False


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model='bert'"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "tokenizer.ggml.pre='unheard-of'"),
        ({"tokenizer.ggml.tokens": []}, "tokens is missing"),
        ({"tokenizer.ggml.model": "llama"}, "one score for each"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(changes: dict[str, Any], words: str) -> None:
    metadata = {**byte_level_metadata(PAIRS[0][0], "gpt-2"), **changes}
    with pytest.raises(ValueError, match=words):
        tokenizer_from_gguf(metadata, "f")
