"""Public facade of the tokenizers.  Layer L7; re-exports only."""

from vllm.transformers_utils.tokenizer import TokenizerLike, get_tokenizer

__all__ = ["TokenizerLike", "get_tokenizer"]
