import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from tests.helpers.model_folders import write_model_folder
from vllm.config import (
    DiffusionConfig,
    ECTransferConfig,
    KVTransferConfig,
    ReasoningConfig,
    StructuredOutputsConfig,
    VllmConfig,
)
from vllm.config.refusals import refuse_unserved
from vllm.engine.arg_defaults import default_limits
from vllm.engine.arg_unsupported import UNSUPPORTED
from vllm.engine.arg_utils import TABLE, AsyncEngineArgs, EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

# Every engine flag of the public interface with its default; None = no default.
PUBLIC_FLAGS = (Path(__file__).parent / "public_flags.txt").read_text().splitlines()
SHORT_FLAGS = {f"-{name}" for name in ("q", "n", "r", "ep", "sc", "cc", "tp", "pp", "dcp", "pcp", "dp")} | {
    f"-dp{letter}" for letter in "lnrapbhem"
}


@pytest.fixture
def folder(tmp_path):
    return write_model_folder(tmp_path / "m")


@pytest.fixture
def parser():
    made = FlexibleArgumentParser(prog="vllm")
    EngineArgs.add_cli_args(made)
    return made


def build(folder, **fields):
    return EngineArgs(folder, **fields).create_engine_config()


@pytest.mark.parametrize("flag", PUBLIC_FLAGS)
def test_every_public_flag_exists_with_its_default(parser, flag):
    name, _, default = flag.partition("=")
    action = parser._option_string_actions[name]
    if name == "--device-memory-utilization":
        assert action.dest == "gpu_memory_utilization"
        return
    shown = "" if action.default is None or action.default == "" else str(action.default)
    assert shown == default
    assert TABLE[action.dest].doc


def test_every_public_short_flag_exists(parser):
    assert set(parser._option_string_actions) >= SHORT_FLAGS


def test_every_boolean_can_be_denied(parser):
    for spec in TABLE.values():
        if spec.kind == "bool":
            assert f"--no-{spec.name.replace('_', '-')}" in parser._option_string_actions


def test_flags_reach_the_configuration(parser, folder):
    args = parser.parse_args(
        [
            "--model", folder, "--kv-transfer-config.kv_role", "kv_both", "--kv-transfer-config.kv_connector", "ExampleConnector",
            "--max-model-len", "0.1k", "--block-size", "32", "--no-enable-prefix-caching", "--kv-cache-dtype", "bfloat16",
            "--scheduling-policy", "priority", "--max-num-seqs", "4", "--max-num-batched-tokens", "1K", "--seed", "7",
            "--kv-events-config", '{"enable_kv_cache_events": true, "buffer_steps": 1k}', "--kv-cache-memory-bytes", "2M",
            "--hf-overrides.vocab_size", "99", "--served-model-name", "a", "b", "--attention-backend", "TORCH_REF",
            "--structured-outputs-config.disable_any_whitespace", "true", "--reasoning-parser", "qwen3", "--scheduler-cls", "None",
        ]
    )  # fmt: skip
    config = EngineArgs.from_cli_args(args).create_engine_config()
    assert config.kv_transfer_config.kv_connector == "ExampleConnector"
    assert (config.model_config.max_model_len, config.model_config.seed) == (100, 7)
    assert config.model_config.served_model_name == ["a", "b"]
    assert config.model_config.get_vocab_size() == 99
    assert (config.cache_config.block_size, config.cache_config.enable_prefix_caching) == (32, False)
    assert (config.cache_config.cache_dtype, config.cache_config.kv_cache_memory_bytes) == ("bfloat16", 2**21)
    assert (config.scheduler_config.policy, config.scheduler_config.max_num_seqs) == ("priority", 4)
    assert (config.scheduler_config.max_num_batched_tokens, config.scheduler_config.scheduler_cls) == (
        1024,
        None,
    )
    assert (config.kv_events_config.buffer_steps, config.kv_events_config.publisher) == (1000, "zmq")
    assert config.attention_config.backend == "TORCH_REF"
    structured = config.structured_outputs_config
    assert (structured.disable_any_whitespace, structured.reasoning_parser) == (True, "qwen3")


def test_defaults_are_those_of_the_config_classes(folder):
    config = build(folder)
    assert config.cache_config.enable_prefix_caching is True
    assert config.scheduler_config.enable_chunked_prefill is True
    assert (config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs) == (
        2048,
        128,
    )
    assert config.parallel_config.data_parallel_rank == 0
    offline = EngineArgs(folder).create_engine_config(UsageContext.LLM_CLASS)
    assert (offline.scheduler_config.max_num_batched_tokens, offline.scheduler_config.max_num_seqs) == (
        4096,
        256,
    )


def test_limits_fit_each_other_when_only_one_is_given(folder):
    assert build(folder, max_num_batched_tokens=64).scheduler_config.max_num_seqs == 64
    long = write_model_folder(Path(folder).parent / "long", max_position_embeddings=9000)
    assert build(long, enable_chunked_prefill=False).scheduler_config.max_num_batched_tokens == 9000


@pytest.mark.parametrize(
    ("memory_gb", "name", "usage", "expected"),
    [
        (180, "B200", UsageContext.API_SERVER, (16384, 1024)), (141, "H200", UsageContext.LLM_CLASS, (16384, 1024)),
        (141, "H200", UsageContext.API_SERVER, (8192, 1024)), (80, "NVIDIA A100-SXM4", None, (2048, 256)),
        (24, "L4", UsageContext.LLM_CLASS, (8192, 256)),
    ],
)  # fmt: skip
def test_default_limits_by_device(memory_gb, name, usage, expected):
    platform = SimpleNamespace(
        is_cpu=lambda: False, is_unspecified=lambda: False,
        get_device_total_memory=lambda: memory_gb * 10**9, get_device_name=lambda: name,
    )  # fmt: skip
    limits = default_limits(platform, usage, 1)
    assert (limits.tokens, limits.seqs) == expected


def test_parts_may_be_objects_mappings_or_text(folder):
    for part in (
        KVTransferConfig(kv_connector="A", kv_role="kv_both"),
        {"kv_connector": "A", "kv_role": "kv_both"},
        '{"kv_connector": "A", "kv_role": "kv_both"}',
    ):
        assert build(folder, kv_transfer_config=part).kv_transfer_config.kv_connector == "A"
    given = StructuredOutputsConfig(disable_any_whitespace=True)
    assert build(folder, structured_outputs_config=given).structured_outputs_config is given


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_transfer_config": {"kv_conector": "A"}}, "kv_transfer_config.*did you mean 'kv_connector'"),
        ({"kv_transfer_config": "{"}, "kv_transfer_config.*not valid JSON"),
        ({"kv_events_config": 3}, "kv_events_config=3 must be a JSON object"),
        ({"runner": "pooling"}, "runner='pooling'"),
        ({"convert": "embed"}, "convert='embed'"),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 0},
            "data_parallel_rank=0 is not supported with data_parallel_size=2: one server starts all replicas",
        ),
        (
            {"data_parallel_address": "10.0.0.1", "data_parallel_size": 2},
            "data-parallel-address.*on one node",
        ),
        (
            {"data_parallel_external_lb": True, "data_parallel_size": 2},
            "data-parallel-external-lb.*one server",
        ),
        (
            {"data_parallel_backend": "ray", "data_parallel_size": 2},
            "data-parallel-backend='ray'.*on one node",
        ),
        (
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size=2 is not supported: only tensor_parallel_size",
        ),
        ({"block_size": -4}, "block_size"),
        ({"max_model_len": 10**6}, "max_model_len=1000000"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"load_format": "tensorizer"}, "load_format='tensorizer'"),
        ({"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"}, "lmcache"),
    ],
)
def test_settings_that_cannot_work_are_refused_naming_them(folder, fields, words):
    with pytest.raises(ValueError, match=words):
        build(folder, **fields)


VALUES = {"bool": True, "int": 77, "float": 7.5, "text": "zz", "text*": ["zz"], "int*": [7], "json": {"z": 1}}


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_no_flag_without_a_feature_is_silently_ignored(folder, name, monkeypatch):
    entry = UNSUPPORTED[name]
    said = []
    monkeypatch.setattr(
        "vllm.engine.arg_unsupported.logger.warning_once", lambda message, *args: said.append(message % args)
    )
    flag = f"--{name.replace('_', '-')}"
    value = VALUES[entry.kind]
    if entry.refuse:
        with pytest.raises(ValueError, match=f"^{flag}=.*not supported: ."):
            build(folder, **{name: value})
    else:
        build(folder, **{name: value})
        assert said == [f"{flag} has no effect: {entry.reason}"]
    for accepted in (entry.default, *entry.accepted):
        said.clear()
        build(folder, **{name: accepted})
        assert said == []


def test_unknown_environment_variables(folder, monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MOD", "1")
    build(folder)
    with pytest.raises(ValueError, match="VLLM_SERVER_DEV_MOD; did you mean VLLM_SERVER_DEV_MODE"):
        build(folder, fail_on_environ_validation=True)


def test_unknown_keyword_is_a_type_error(folder):
    with pytest.raises(TypeError):
        EngineArgs(folder, max_num_sequences=3)


def test_fields_are_a_dataclass_with_model_first():
    fields = [field.name for field in dataclasses.fields(EngineArgs)]
    assert fields[0] == "model"
    assert set(TABLE) == set(fields)
    assert EngineArgs().hf_overrides is not EngineArgs().hf_overrides


def test_async_args_add_request_logging(parser, folder):
    args = parser.parse_args(["--model", folder])
    args.enable_log_requests = True
    made = AsyncEngineArgs.from_cli_args(args)
    assert made.enable_log_requests is True
    assert made.model == folder
    assert isinstance(made, EngineArgs)


def test_bad_choice_is_a_usage_error(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["--scheduling-policy", "lifo"])
    assert "priority" in capsys.readouterr().err


def test_validation_error_names_class_and_field(folder):
    with pytest.raises(ValidationError, match=r"SchedulerConfig\s+watermark"):
        build(folder, watermark=1.5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mamba_cache_dtype": "bfloat16"}, "mamba_cache_dtype='bfloat16' is not supported"),
        ({"mamba_ssm_cache_dtype": "float32"}, "mamba_ssm_cache_dtype='float32' is not supported"),
        ({"quantization": "awq"}, "quantization='awq' is not supported"),
        (
            {"hf_overrides": {"quantization_config": {"quant_method": "fp8"}}},
            "quantization='fp8' is not supported",
        ),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "A",
                    "kv_role": "kv_both",
                    "enable_permute_local_kv": True,
                }
            },
            "enable_permute_local_kv=True is not supported",
        ),
    ],
)
def test_config_values_that_no_engine_honours_are_refused(folder, fields, words):
    with pytest.raises(ValueError, match=words):
        build(folder, **fields)


def test_records_of_unknown_features_are_refused(folder):
    config = build(folder)
    refuse_unserved(config)
    for name, record in (
        ("ec_transfer_config", ECTransferConfig(ec_connector="X")),
        ("diffusion_config", DiffusionConfig()),
        ("reasoning_config", ReasoningConfig()),
    ):
        with pytest.raises(ValueError, match=rf"{name}={type(record).__name__}\(.*is not supported"):
            refuse_unserved(dataclasses.replace(config, **{name: record}))
    refuse_unserved(VllmConfig())


def test_values_without_effect_warn(folder, caplog):
    transfer = {"kv_connector": "A", "kv_role": "kv_both", "kv_port": 1}
    build(folder, swa_bounded_replay=False, kv_transfer_config=transfer)
    assert "swa_bounded_replay=False has no effect" in caplog.text
    assert "kv_port=1 has no effect" in caplog.text


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_bad_number_of_tokens_is_the_only_fault_told(folder, tokens):
    with pytest.raises(ValidationError) as refused:
        build(folder, max_num_batched_tokens=tokens)
    assert [fault["loc"] for fault in refused.value.errors()] == [("max_num_batched_tokens",)]
