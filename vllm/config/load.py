"""Where weights come from and how they are read. Layer: L1."""

from __future__ import annotations

from vllm.config.setting import HIDDEN, config, setting

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@config
class LoadConfig:
    """Weight loading."""

    load_format: str = setting(
        default="auto", doc="auto (by the files found), safetensors, gguf, or dummy (random weights)."
    )
    download_dir: str | None = setting(default=None, doc="Cache folder for downloaded models.")
    use_tqdm_on_load: bool = setting(default=True, doc="Show a progress bar while loading.")
    device: str | None = setting(
        default=None, doc="Device to load on; the engine's when not given.", flag=HIDDEN
    )

    def __post_init__(self) -> None:
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(
                f"load_format={self.load_format!r} is not supported; supported: {', '.join(LOAD_FORMATS)}"
            )
