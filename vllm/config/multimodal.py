"""Media inputs. This engine serves text; the record exists for code that reads its limits. Layer: L1."""

from __future__ import annotations

from vllm.config.setting import HIDDEN, Flag, config, setting


@config
class MultiModalConfig:
    """Limits of media inputs per prompt."""

    limit_per_prompt: dict[str, int] = setting(
        default_factory=dict, doc="Most items per modality.", flag=Flag(name="limit_mm_per_prompt")
    )
    language_model_only: bool = setting(default=False, doc="Load and serve the text part only.", flag=HIDDEN)

    def get_limit_per_prompt(self, modality: str) -> int:
        """Most items of `modality` in one prompt."""
        return 0 if self.language_model_only else self.limit_per_prompt.get(modality, 0)
