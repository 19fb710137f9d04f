"""What is measured and exported. Layer: L1."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vllm.config.setting import HIDDEN, config, setting


@config
class ObservabilityConfig:
    """Metrics beyond the standing ones."""

    per_request_spec_decode_metrics: Literal["none", "basic", "detailed"] = setting(
        default="none", doc="Speculation figures per request.", flag=HIDDEN
    )
    kv_cache_metrics: bool = setting(default=False, doc="Sample lifetime, idle time and reuse of KV blocks.")
    kv_cache_metrics_sample: Annotated[float, Field(gt=0, le=1)] = setting(
        default=0.01, doc="Share of blocks that is sampled."
    )
    show_hidden_metrics_for_version: str | None = setting(
        default=None, doc="Also export metrics that were hidden since this version."
    )

    @property
    def show_hidden_metrics(self) -> bool:
        """Whether hidden metrics are exported."""
        return self.show_hidden_metrics_for_version is not None
