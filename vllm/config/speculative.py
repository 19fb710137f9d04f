"""Speculative decoding as far as the scheduler and the KV manager must know it. Layer: L1."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from vllm.config.setting import config, setting

EAGLE_METHODS = ("eagle", "eagle3", "mtp", "deepseek_mtp")
# Drafters whose last KV slot depends on tokens after the block, so that a hashed block needs lookahead.
LOOKAHEAD_METHODS: tuple[str, ...] = ()
# Drafters of earlier versions of the interface.
REMOVED_METHODS = ("medusa", "mlp_speculator")


@config
class SpeculativeConfig:
    """Draft method and its depth (`--speculative-config`)."""

    model: str | None = setting(default=None, doc="Draft model.")
    method: str | None = setting(default=None, doc="ngram, eagle, eagle3, mtp, draft_model, …")
    num_speculative_tokens: Annotated[int, Field(ge=1)] | None = setting(default=None, doc="Drafts per step.")
    # The target's configs, as the aggregate passes them in; partial records are accepted.
    target_model_config: Any = setting(default=None, doc="Model config of the target.")
    target_parallel_config: Any = setting(default=None, doc="Parallel config of the target.")
    disable_eagle_block_drop: bool = setting(
        default=False, doc="Keep the last matched block of a prefix hit although the drafter has not seen it."
    )
    disable_lookahead_block_hashes: bool = setting(
        default=False, doc="Hash blocks without the tokens that follow them."
    )

    def __post_init__(self) -> None:
        if self.num_speculative_tokens is None:
            raise ValueError("num_speculative_tokens must be given with speculative_config")
        if self.method is None:
            self.method = "draft_model" if self.model is not None else "ngram"
        if self.method in REMOVED_METHODS:
            raise ValueError(f"method={self.method!r} was removed from the interface")

    def use_eagle(self) -> bool:
        """Whether the drafter reads the target's hidden states."""
        return self.method in EAGLE_METHODS

    def needs_eagle_block_drop(self) -> bool:
        """Whether the drafter's last KV slot of a cached block would be wrong without further measures."""
        return self.use_eagle()

    def use_eagle_block_drop(self) -> bool:
        """Whether the last matched block of a prefix hit is dropped for the drafter."""
        return (
            self.needs_eagle_block_drop()
            and not self.disable_eagle_block_drop
            and self.lookahead_tokens() == 0
        )

    def lookahead_tokens(self) -> int:
        """Tokens after a block that its hash covers; 0 without lookahead hashing."""
        if self.disable_lookahead_block_hashes or self.method not in LOOKAHEAD_METHODS:
            return 0
        return 1
