"""The command line: every flag with its default, every second spelling, and a value for those with choices."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from tests.public_api.flags import ALIASES, FLAGS, VALUES
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.common.startup import get_non_default_args
from vllm.utils.argparse_utils import FlexibleArgumentParser


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser())


@pytest.fixture(scope="module")
def defaults(parser: FlexibleArgumentParser) -> argparse.Namespace:
    return parser.parse_args([])


def action_of(parser: FlexibleArgumentParser, flag: str) -> argparse.Action:
    assert flag in parser._option_string_actions, f"{flag} is not known"
    return parser._option_string_actions[flag]


@pytest.mark.parametrize(("flag", "default"), FLAGS.items())
def test_flag_and_default(
    parser: FlexibleArgumentParser, defaults: argparse.Namespace, flag: str, default: Any
) -> None:
    value = getattr(defaults, action_of(parser, flag).dest)
    if default == {}:
        assert not value
        return
    assert value == default
    assert type(value) is type(default) or isinstance(default, int | float)


@pytest.mark.parametrize(("flag", "default"), [item for item in FLAGS.items() if isinstance(item[1], bool)])
def test_booleans_can_be_given_and_denied(parser: FlexibleArgumentParser, flag: str, default: bool) -> None:
    dest = action_of(parser, flag).dest
    assert getattr(parser.parse_args([flag]), dest) is True
    assert getattr(parser.parse_args([flag.replace("--", "--no-", 1)]), dest) is False


@pytest.mark.parametrize(("alias", "flag"), ALIASES.items())
def test_second_spellings(parser: FlexibleArgumentParser, alias: str, flag: str) -> None:
    if "_" in alias:
        assert getattr(parser.parse_args([alias, "3"]), action_of(parser, flag).dest) == 3
        return
    assert action_of(parser, alias) is action_of(parser, flag)


@pytest.mark.parametrize(("flag", "given"), VALUES.items())
def test_values(parser: FlexibleArgumentParser, flag: str, given: tuple[list[str], Any]) -> None:
    texts, value = given
    assert getattr(parser.parse_args([flag, *texts]), action_of(parser, flag).dest) == value


def test_spellings_of_json_flags(parser: FlexibleArgumentParser) -> None:
    args = parser.parse_args(
        [
            "some/model",
            "--kv-transfer-config.kv_role",
            "kv_both",
            "--kv-transfer-config.kv_connector_extra_config.cpu_bytes_to_use",
            "2G",
            "--compilation-config.capture+",
            "1",
            "-cc.capture+=2,3",
            "-sc.method",
            "ngram",
            "-O",
            "1",
        ]
    )
    assert args.model_tag == "some/model"
    assert args.kv_transfer_config == {
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 2 * 2**30},
    }
    assert [int(value) for value in args.compilation_config["capture"]] == [1, 2, 3]
    assert args.speculative_config == {"method": "ngram"}
    assert args.optimization_level == 1


@pytest.mark.parametrize("text", ["25.6K", "x", "1kk"])
def test_integers_that_are_refused(parser: FlexibleArgumentParser, text: str) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["--max-model-len", text])


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_the_longest_that_fits(parser: FlexibleArgumentParser, text: str) -> None:
    assert parser.parse_args(["--max-model-len", text]).max_model_len == -1


@pytest.mark.parametrize("port", ["80", "70000"])
def test_ports_out_of_range(parser: FlexibleArgumentParser, port: str) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["--port", port])


def test_a_config_file_lies_below_the_command_line(parser: FlexibleArgumentParser, tmp_path: Any) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "max-num-seqs: 7\nseed: 3\nenforce-eager: true\nenable-prefix-caching: false\nmiddleware: []\n"
    )
    args = parser.parse_args(["serve", "m", "--config", str(file), "--seed", "4"][2:])
    assert (args.max_num_seqs, args.seed, args.enforce_eager, args.enable_prefix_caching) == (
        7,
        4,
        True,
        False,
    )
    wrong = tmp_path / "serve.txt"
    wrong.write_text("seed: 3\n")
    with pytest.raises((ValueError, SystemExit)):
        parser.parse_args(["--config", str(wrong)])


def test_checks_across_flags(parser: FlexibleArgumentParser, defaults: argparse.Namespace) -> None:
    validate_parsed_serve_args(defaults)
    args = parser.parse_args(["--max-num-seqs", "9"])
    assert get_non_default_args(args) == {"max_num_seqs": 9}
    with pytest.raises((TypeError, ValueError)):
        validate_parsed_serve_args(parser.parse_args(["--enable-auto-tool-choice"]))


@pytest.mark.parametrize("command", ["serve", "chat", "complete", "bench", "collect-env", "run-batch"])
def test_subcommands(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["vllm", command, "--help"])
    assert exit_status() == 0
    assert "usage" in capsys.readouterr().out.lower()


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["vllm", "--version"])
    assert exit_status() == 0
    assert "0.33.0" in capsys.readouterr().out


def exit_status() -> object:
    """What the console script ends with, whether `main` returns it or exits itself."""
    try:
        return main()
    except SystemExit as done:
        return done.code or 0
