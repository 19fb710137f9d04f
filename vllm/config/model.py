"""The model: which one, in which precision, how long, and what its config record says about it. Layer: L1.

Reads `config.json` once, at construction. Knows no weights, no tokenizer and no model code.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vllm import envs
from vllm.config import model_facts as facts
from vllm.config.model_checks import check_config
from vllm.config.model_dtype import TorchDType, check_dtype
from vllm.config.multimodal import MultiModalConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.setting import HIDDEN, Flag, config, setting, state
from vllm.logger import init_logger
from vllm.transformers_utils.config import ModelSource, get_config, get_generation_config
from vllm.transformers_utils.config_record import ConfigRecord
from vllm.utils.registry import resolve_object

logger = init_logger(__name__)

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
RunnerType = Literal["generate", "pooling", "draft"]
RunnerOption = Literal["auto", "generate", "pooling", "draft"]
ConvertOption = Literal["auto", "none", "embed", "classify"]
TokenizerMode = Literal["auto", "hf", "slow"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
_GENERATION_DEFAULTS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")


@config
class ModelConfig:
    """The model and how it is run."""

    model: str = setting(default=DEFAULT_MODEL, doc="Folder, GGUF file or repository id of the model.")
    runner: RunnerOption = setting(default="auto", doc="Kind of model run.")
    convert: ConvertOption = setting(
        default="auto", doc="Adapter that turns a generative model into another kind."
    )
    tokenizer: str | None = setting(
        default=None, doc="Folder or repository id of the tokenizer; the model's own."
    )
    tokenizer_mode: TokenizerMode = setting(default="auto", doc="Which tokenizer implementation to use.")
    trust_remote_code: bool = setting(
        default=False, doc="Accepted; code from model repositories is never run: all models are built in."
    )
    # A name or a torch.dtype; read as a torch.dtype.
    dtype: Any = setting(default="auto", doc="Precision of weights and activations.")
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = setting(default=0, doc="Seed of everything random.")
    max_model_len: Annotated[int, Field(ge=-1)] | None = setting(
        default=None,
        doc="Longest sequence, prompt and output; the model's own when not given, -1 (auto) what fits in memory.",
        flag=Flag(human=True),
    )
    quantization: str | None = setting(
        default=None,
        doc="Weight quantization; read from the checkpoint when not given.",
        flag=Flag(short="q"),
    )
    enforce_eager: bool = setting(default=False, doc="Never capture device graphs.")
    skip_tokenizer_init: bool = setting(
        default=False, doc="Token ids in, token ids out; no tokenizer is loaded."
    )
    # Overrides of config.json: any JSON values, or a function of the record.
    hf_overrides: Any = setting(default_factory=dict, doc="Values that replace those of config.json.")
    served_model_name: str | list[str] | None = setting(
        default=None, doc="Names clients use; the first is reported. The model's name when not given."
    )
    max_logprobs: Annotated[int, Field(ge=-1)] = setting(
        default=20, doc="Most log probabilities per token; -1 allows the whole vocabulary."
    )
    logprobs_mode: LogprobsMode = setting(default="raw_logprobs", doc="What log probabilities are taken of.")
    enable_trace_replay: bool = setting(default=False, doc="Allow requests that prescribe their output.")
    revision: str | None = setting(default=None, doc="Branch, tag or commit of the model repository.")
    tokenizer_revision: str | None = setting(
        default=None, doc="Branch, tag or commit of the tokenizer repository."
    )
    hf_config_path: str | None = setting(default=None, doc="Folder or repository id of another config.json.")
    hf_token: str | bool | None = setting(default=None, doc="Token for gated repositories.", secret=True)
    disable_sliding_window: bool = setting(default=False, doc="Limit the length to the window instead.")
    generation_config: str = setting(
        default="auto", doc="Sampling defaults: auto (the model's), vllm (none), or a folder."
    )
    override_generation_config: dict[str, Any] = setting(
        default_factory=dict, doc="Values that replace those of the generation config."
    )
    logits_processors: list[Any] | None = setting(
        default=None, doc="Classes, or their dotted paths, that change logits before sampling."
    )
    multimodal_config: MultiModalConfig | None = setting(
        default=None, doc="Limits of media inputs.", flag=HIDDEN
    )

    # Plain records of whatever the file holds.
    hf_config: Any = state(default=None, doc="The checkpoint's record.")
    hf_text_config: Any = state(default=None, doc="Its language part.")
    original_max_model_len: int | None = state(default=None, doc="The length as given: None, -1 or a number.")
    supports_kv_cache_grouping: bool = state(
        default=False, doc="Whether the model class groups its own KV layers."
    )
    runner_type: RunnerType = state(default="generate", doc="Resolved kind of model run.")

    def __post_init__(self) -> None:
        self.dtype = check_dtype(vars(self)["dtype"])
        self.tokenizer = self.tokenizer or self.model
        self.tokenizer_revision = self.tokenizer_revision or self.revision
        self.runner_type = "generate" if self.runner == "auto" else self.runner
        self.hf_config = self._read_config()
        check_config(self.hf_config)
        self.hf_text_config = self.hf_config.get_text_config()
        self.original_max_model_len = self.max_model_len
        self.max_model_len = self._resolve_max_model_len(self.max_model_len)
        if isinstance(self.served_model_name, list) and not self.served_model_name:
            self.served_model_name = None
        if self.served_model_name is None:
            self.served_model_name = self.model
        if self.multimodal_config is None and self.is_multimodal_model:
            self.multimodal_config = MultiModalConfig(language_model_only=True)

    # --- reading the checkpoint -------------------------------------------------------------------------------

    def _source(self) -> ModelSource:
        return ModelSource(self.hf_config_path or self.model, self.revision, self.hf_token)

    def _read_config(self) -> ConfigRecord:
        record = get_config(self._source())
        if callable(self.hf_overrides):
            changed = self.hf_overrides(record)
            return changed if isinstance(changed, ConfigRecord) else record
        if not isinstance(self.hf_overrides, dict):
            raise ValueError(f"hf_overrides={self.hf_overrides!r} must be a mapping or a function")
        record.update(self.hf_overrides)
        return record

    def _resolve_max_model_len(self, wanted: int | None) -> int:
        stated = facts.max_length(self.hf_text_config)
        window = facts.sliding_window(self.hf_text_config)
        if self.disable_sliding_window and window is not None:
            stated = window if stated is None else min(stated, window)
        if wanted is None or wanted == -1:
            if stated is None:
                logger.warning_once(
                    "The model states no length; max_model_len=%d is assumed", facts.DEFAULT_MODEL_LENGTH
                )
            return stated or facts.DEFAULT_MODEL_LENGTH
        if wanted == 0:
            raise ValueError("max_model_len=0 must be at least 1, or -1 for what fits in memory")
        if stated is not None and wanted > stated:
            message = (
                f"max_model_len={wanted} is larger than the {stated} tokens that the model's config states"
            )
            if not envs.VLLM_ALLOW_LONG_MAX_MODEL_LEN:
                raise ValueError(f"{message}; set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 to try it anyway")
            logger.warning("%s; outputs beyond that may be poor", message)
        return wanted

    def try_get_generation_config(self) -> dict[str, Any]:
        """The generation defaults of the checkpoint (or of the folder `generation_config`); may be empty."""
        if self.generation_config == "vllm":
            return {}
        if self.generation_config == "auto":
            return get_generation_config(self._source())
        return get_generation_config(ModelSource(self.generation_config))

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Sampling defaults for requests that do not give a value, by the names of `SamplingParams`."""
        values = {**self.try_get_generation_config(), **self.override_generation_config}
        found = {key: values[key] for key in _GENERATION_DEFAULTS if values.get(key) is not None}
        if "max_new_tokens" in found:
            found["max_tokens"] = found.pop("max_new_tokens")
        return found

    # --- facts about the model --------------------------------------------------------------------------------

    @property
    def architectures(self) -> list[str]:
        """Class names that the checkpoint states."""
        return list(self.hf_config.get("architectures") or [])

    @property
    def registry(self) -> Any:
        """The registry of model classes."""
        return resolve_object("vllm.model_executor.models.registry:ModelRegistry")

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder whose output the decoder attends to."""
        return facts.is_encoder_decoder(self.hf_config)

    @property
    def is_hybrid(self) -> bool:
        """Whether recurrent layers stand beside attention layers."""
        return facts.is_hybrid(self.hf_text_config)

    @property
    def is_attention_free(self) -> bool:
        """Whether no layer keeps keys and values."""
        return facts.is_attention_free(self.hf_text_config)

    @property
    def use_mla(self) -> bool:
        """Whether the cache holds one latent row per token."""
        return facts.is_mla(self.hf_text_config)

    @property
    def is_multimodal_model(self) -> bool:
        """Whether the checkpoint also takes media."""
        return facts.has_media_inputs(self.hf_config)

    def get_hidden_size(self) -> int:
        """Width of the residual stream."""
        return facts.hidden_size(self.hf_text_config)

    def get_vocab_size(self) -> int:
        """Number of token ids."""
        return facts.vocab_size(self.hf_text_config)

    def get_head_size(self) -> int:
        """Elements of one head of one token in the cache."""
        return facts.head_size(self.hf_text_config)

    def get_total_num_kv_heads(self) -> int:
        """Key/value heads over all ranks."""
        return facts.num_kv_heads(self.hf_text_config)

    def get_num_kv_heads(self, parallel_config: ParallelConfig) -> int:
        """Key/value heads of one rank; heads are repeated where there are fewer than ranks."""
        return max(1, self.get_total_num_kv_heads() // parallel_config.tensor_parallel_size)

    def get_num_attention_heads(self, parallel_config: ParallelConfig) -> int:
        """Query heads of one rank."""
        return facts.num_attention_heads(self.hf_text_config) // parallel_config.tensor_parallel_size

    def get_total_num_hidden_layers(self) -> int:
        """Layers over all pipeline stages."""
        return facts.num_hidden_layers(self.hf_text_config)

    def get_num_layers(self, parallel_config: ParallelConfig) -> int:
        """Layers of this rank's pipeline stage; the last stages take one less where they do not divide evenly."""
        stages = parallel_config.pipeline_parallel_size
        stage = parallel_config.rank // parallel_config.tensor_parallel_size % stages
        base, extra = divmod(self.get_total_num_hidden_layers(), stages)
        return base + (1 if stage < extra else 0)

    def get_layer_kinds(self) -> list[str]:
        """The kind of each layer as the checkpoint names it; empty if it names none."""
        return facts.layer_kinds(self.hf_text_config)

    def get_sliding_window(self) -> int | None:
        """Window of the windowed layers in tokens; None without any or with `disable_sliding_window`."""
        return None if self.disable_sliding_window else facts.sliding_window(self.hf_text_config)


ModelConfig.dtype = TorchDType("auto")
