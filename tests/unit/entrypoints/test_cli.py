import logging
import signal
import subprocess
import sys

import pytest
from pydantic import BaseModel, ValidationError

from tests.helpers.model_folders import write_model_folder
from vllm.config.error_text import error_text
from vllm.entrypoints.cli import collect_env, commands, main, serve
from vllm.entrypoints.common import cli_args, startup
from vllm.entrypoints.common.cli_args import (
    make_arg_parser,
    refuse_unsupported,
    resolve_model,
    validate_parsed_serve_args,
)
from vllm.entrypoints.common.frontend_args import FrontendArgs
from vllm.entrypoints.openai import cli_args as facade
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.utils import process_end
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.exceptions import EngineStartError
from vllm.version import __version__

# Flags of the server itself with their defaults in the public interface.
DEFAULTS = {
    "host": None, "port": 8000, "uds": None, "root_path": None, "api_key": None, "middleware": [], "served_model_name": None,
    "lora_modules": None, "chat_template": None, "chat_template_content_format": "auto", "trust_request_chat_template": False,
    "trust_request_mm_kwargs": False, "default_chat_template_kwargs": None, "response_role": "assistant",
    "return_tokens_as_token_ids": False, "enable_auto_tool_choice": False, "tool_call_parser": None, "tool_parser_plugin": "",
    "tool_server": None, "exclude_tools_when_tool_choice_none": False, "enable_prompt_tokens_details": False,
    "enable_force_include_usage": False, "enable_server_load_tracking": False, "enable_per_request_metrics": False,
    "enable_tokenizer_info_endpoint": False, "enable_log_requests": False, "enable_log_outputs": False, "enable_log_deltas": True,
    "max_log_len": None, "log_error_stack": None, "enable_request_id_headers": False, "disable_fastapi_docs": False,
    "enable_offline_docs": False, "uvicorn_log_level": "info", "disable_uvicorn_access_log": False,
    "disable_access_log_for_endpoints": None, "sse_keep_alive_interval": 0.0, "allowed_origins": [], "allowed_methods": ["*"],
    "allowed_headers": ["*"], "allow_credentials": False, "h11_max_header_count": 256, "ssl_keyfile": None, "ssl_certfile": None,
    "ssl_ca_certs": None, "ssl_cert_reqs": 0, "ssl_ciphers": None, "enable_ssl_refresh": False, "tokens_only": False,
    "enable_scale_out": False, "headless": False, "api_server_count": None, "config": None, "grpc": False, "model_tag": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def parser():
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


def test_every_server_flag_has_its_public_default(parser):
    args = vars(parser.parse_args([]))
    assert {name: args[name] for name in DEFAULTS} == DEFAULTS


def test_the_old_place_of_the_flags_still_works():
    assert facade.make_arg_parser is cli_args.make_arg_parser
    assert facade.FrontendArgs is FrontendArgs
    assert FrontendArgs().port == 8000


def test_model_as_argument_or_flag(parser, caplog):
    args = parser.parse_args(["some/model"])
    resolve_model(args)
    assert args.model == "some/model"
    args = parser.parse_args(["--model", "other/model"])
    resolve_model(args)
    assert args.model == "other/model"
    assert "first argument" in caplog.text
    args = parser.parse_args(["--tokens-only"])
    resolve_model(args)
    assert (args.model, args.skip_tokenizer_init) == ("Qwen/Qwen3-0.6B", True)


def test_repeatable_and_listed_flags(parser):
    args = parser.parse_args(
        [
            "--middleware",
            "a.b",
            "--middleware",
            "c.d",
            "--api-key",
            "k1",
            "k2",
            "--allowed-origins",
            '["x"]',
            "--served-model-name",
            "p",
            "q",
        ]
    )
    assert (args.middleware, args.api_key, args.allowed_origins, args.served_model_name) == (
        ["a.b", "c.d"],
        ["k1", "k2"],
        ["x"],
        ["p", "q"],
    )


def test_adapters_in_both_spellings(parser):
    args = parser.parse_args(
        ["--lora-modules", "a=/x", '{"name": "b", "path": "/y", "base_model_name": "z"}']
    )
    assert args.lora_modules == [LoRAModulePath("a", "/x"), LoRAModulePath("b", "/y", "z")]


@pytest.mark.parametrize(
    "bad",
    [
        ["--lora-modules", "nopath"],
        ["--lora-modules", '{"name": 1'],
        ["--lora-modules", '{"nome": "x"}'],
        ["--port", "80"],
        ["--port", "x"],
        ["--port", "70000"],
        ["--port", "80_80"],
        ["--port", "+8080"],
    ],
)
def test_usage_errors(parser, bad):
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(bad)
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("flags", "kind", "words"),
    [
        (["--enable-auto-tool-choice"], TypeError, "--tool-call-parser"),
        (["--tool-call-parser", "nope"], ValueError, "'nope'; known"),
        (["--enable-log-outputs"], TypeError, "--enable-log-requests"),
        (["--reasoning-parser", "nope"], ValueError, "--reasoning-parser 'nope'"),
        (["--chat-template", "nowhere.jinja"], ValueError, r"nowhere\.jinja"),
        (["--ssl-keyfile", "k"], TypeError, "--ssl-certfile"),
        (["--tool-parser-plugin", "none.py"], ValueError, "not a file"),
    ],
)
def test_flags_are_checked_against_each_other(parser, flags, kind, words):
    with pytest.raises(kind, match=words):
        validate_parsed_serve_args(parser.parse_args(flags))


def test_good_flags_pass(parser):
    args = parser.parse_args(
        ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", "{{ x }}"]
    )
    validate_parsed_serve_args(args)
    refuse_unsupported(args)


@pytest.mark.parametrize(
    "flags",
    [
        ["--tool-server", "x"], ["--enable-scale-out"], ["--enable-offline-docs"], ["--enable-ssl-refresh"], ["--headless"], ["--grpc"],
        ["--lora-modules", "a=b"], ["--api-server-count", "2"],
    ],
)  # fmt: skip
def test_server_flags_without_a_feature_are_refused(parser, flags):
    with pytest.raises(ValueError, match=f"^{flags[0]}.*not supported"):
        refuse_unsupported(parser.parse_args(flags))


def test_media_arguments_warn(parser, caplog):
    refuse_unsupported(parser.parse_args(["--trust-request-mm-kwargs"]))
    assert "has no effect" in caplog.text


def test_a_config_file(parser, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: m\nport: 9000\nkv-transfer-config: {kv_role: kv_both}\nenable-prefix-caching: false\napi-key: [a, b]\n"
    )
    args = parser.parse_args(["--config", str(path), "--port", "9001"])
    assert (args.model_tag, args.port, args.kv_transfer_config, args.enable_prefix_caching) == (
        "m",
        9001,
        {"kv_role": "kv_both"},
        False,
    )
    assert args.api_key == ["a", "b"]


# --- start-up -----------------------------------------------------------------------------------------------------


def test_non_default_args_mask_secrets(parser, caplog):
    args = parser.parse_args(["m", "--api-key", "secret", "--hf-token", "secret", "--seed", "3"])
    assert startup.get_non_default_args(args) == {
        "model_tag": "m",
        "api_key": "***",
        "hf_token": "***",
        "seed": 3,
    }
    startup.log_non_default_args(args)
    assert "'seed': 3" in caplog.text
    assert "secret" not in caplog.text


def test_workers_are_spawned_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    startup.cli_env_setup()
    assert startup.os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    startup.cli_env_setup()
    assert startup.os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"


def test_logging_flags(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    root = logging.getLogger("vllm")
    monkeypatch.setattr(root, "level", root.level)
    startup.apply_logging_flags("warning", None)
    assert root.level == logging.WARNING
    with pytest.raises(ValueError, match="--log-level='loud'"):
        startup.apply_logging_flags("loud", None)
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "")
    with pytest.raises(ValueError, match="cannot be read"):
        startup.apply_logging_flags(None, str(tmp_path / "none.json"))
    startup.apply_logging_flags(None, None)


# --- commands -----------------------------------------------------------------------------------------------------


def test_help_and_version(capsys):
    assert main.main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__
    assert main.main([]) == 2


@pytest.mark.parametrize(("name", "words"), [("launch", "not offered"), ("dance", "is no command")])
def test_unknown_commands(capsys, name, words):
    assert main.main([name]) == 2
    assert words in capsys.readouterr().err


def test_mendable_errors_are_one_line(capsys, tmp_path):
    folder = write_model_folder(tmp_path / "m")
    assert main.main(["serve", folder, "--watermark", "3"]) == 1
    err = capsys.readouterr().err
    assert "watermark" in err
    assert "Traceback" not in err
    assert main.main(["serve", folder, "--enable-eplb"]) == 1
    assert "--enable-eplb=True is not supported" in capsys.readouterr().err
    assert main.main(["serve", str(tmp_path / "nowhere")]) == 1
    assert str(tmp_path / "nowhere") in capsys.readouterr().err


def test_an_engine_that_cannot_start_is_one_line(monkeypatch, capsys):
    def failing(argv):
        raise EngineStartError("The engine core could not start: the port is taken")

    monkeypatch.setattr(commands, "resolve_object", lambda target: failing)
    assert main.main(["serve"]) == 1
    assert (
        capsys.readouterr().err == "vllm serve: error: The engine core could not start: the port is taken\n"
    )


def test_interrupts_end_with_their_status(monkeypatch):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "resolve_object", lambda target: interrupted)
    assert main.main(["chat"]) == 130


def test_serve_hands_its_flags_to_the_server(monkeypatch):
    seen = []
    monkeypatch.setattr(serve, "resolve_object", lambda target: lambda args: seen.append(args) or 7)
    assert main.main(["serve", "m", "--seed", "5"]) == 7
    assert (seen[0].model_tag, seen[0].seed) == ("m", 5)


@pytest.mark.parametrize(
    "command",
    ["serve", "chat", "complete", "bench serve", "bench latency", "bench throughput", "collect-env"],
)
def test_help_of_a_command_loads_no_model_library(command):
    code = (
        "import sys\nfrom vllm.entrypoints.cli.main import main\n"
        f"try:\n    main({[*command.split(), '--help']!r})\nexcept SystemExit as stop:\n    assert stop.code == 0, stop.code\n"
        "loaded = [m for m in ('torch', 'transformers') if m in sys.modules]\nassert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


def test_collect_env(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert collect_env.main([]) == 0
    out = capsys.readouterr().out
    assert f"vllm: {__version__}" in out
    assert "VLLM_API_KEY=***" in out
    assert "secret" not in out
    monkeypatch.setattr(collect_env, "PACKAGES", ("no-such-package",))
    assert "no-such-package: -" in collect_env.report()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--kv-transfer-config", '{"kv_connector":"SimpleCPUOffloadConnector"}'],
            "kv_connector='SimpleCPUOffloadConnector' needs kv_role: one of kv_producer, kv_consumer, kv_both",
        ),
        (["--max-num-seqs", "0"], "max_num_seqs=0: input should be greater than or equal to 1"),
        (["--kv-transfer-config", '{"kv_rank": "x"}'], "unexpected keyword argument 'kv_rank'"),
        (["--kv-events-config", '{"buffer_steps": -1}'], "buffer_steps=-1"),
        (["--gpu-memory-utilization", "5"], "gpu_memory_utilization=5.0"),
    ],
)
def test_faults_of_settings_are_told_in_one_form(capsys, tmp_path, flags, message):
    assert main.main(["serve", write_model_folder(tmp_path / "m"), *flags]) == 1
    err = capsys.readouterr().err
    assert err.startswith("vllm serve: error: ")
    assert message in err
    assert err.count("\n") == 1
    for noise in ("pydantic", "validation error", "Value error", "input_value", "Traceback"):
        assert noise not in err


def test_many_faults_are_told_up_to_ten():
    class Many(BaseModel):
        values: list[int]

    with pytest.raises(ValidationError) as caught:
        Many(values=["x"] * 30)
    text = error_text(caught.value)
    assert text.count("; ") == 10
    assert text.startswith("values.0='x': input should be a valid integer")
    assert text.endswith("and 20 more")
    assert error_text(OSError(12, "no memory")) == "OSError: [Errno 12] no memory"
    assert error_text(MemoryError()) == "MemoryError"
    assert error_text(ValueError("n=1 is wrong")) == "n=1 is wrong"


@pytest.mark.parametrize(("name", "ends"), [("serve", [7]), ("chat", [])])
def test_only_the_serving_program_ends_without_the_interpreters_farewell(
    monkeypatch, kept_interrupt, name, ends
):
    ended = []
    monkeypatch.setattr(main, "resolve_object", lambda target: lambda argv: 7)
    monkeypatch.setattr(main, "end_process", ended.append)
    monkeypatch.setattr("sys.argv", ["vllm", name])
    assert main.main() == 7
    assert main.main([name]) == 7
    assert ended == ends


def test_a_server_told_to_stop_while_it_starts_does_not_take_all_apart_first(monkeypatch, kept_interrupt):
    ended = []

    def told_to_stop(argv):
        sys.exit(128 + signal.SIGTERM)  # as the handler for that time does

    monkeypatch.setattr(main, "resolve_object", lambda target: told_to_stop)
    monkeypatch.setattr(main, "end_process", ended.append)
    monkeypatch.setattr("sys.argv", ["vllm", "serve"])
    assert main.main() == 143
    assert ended == [143]
    monkeypatch.setattr(main, "resolve_object", lambda target: lambda argv: sys.exit(0))
    with pytest.raises(SystemExit):
        main.main()
    assert ended == [143], "whoever asks for help may be in the same process, and goes on"


# --- interrupts ---------------------------------------------------------------------------------------------------


@pytest.fixture
def kept_interrupt():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_raises_only_once_there_is_something_to_release(kept_interrupt):
    process_end.end_at_interrupt()
    process_end.raise_at_interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process_end.raise_at_interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("moment", ["vllm.entrypoints.cli.commands", "vllm.entrypoints.openai.api_server"])
def test_an_interrupt_while_the_program_loads_ends_it_in_silence(tmp_path, moment, background):
    folder = write_model_folder(tmp_path / "m")
    code = (
        "import os, signal, sys\n"
        f"signal.signal(signal.SIGINT, signal.{'SIG_IGN' if background else 'default_int_handler'})\n"
        "from vllm.entrypoints.cli.main import main\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {moment!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        f"sys.argv = ['vllm', 'serve', {folder!r}]\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"]])
def test_a_reader_that_goes_away_is_no_reason_for_a_stack(words):
    program = [sys.executable, "-m", "vllm.entrypoints.cli.main", *words]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()
        assert child.stderr.read() == b""
