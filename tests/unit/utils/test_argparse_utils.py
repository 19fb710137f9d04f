import argparse
import json
import logging

import pytest

from vllm.utils.argparse_utils import FlexibleArgumentParser, json_value, normal_flag


@pytest.fixture
def parser():
    made = FlexibleArgumentParser(prog="tool")
    made.add_argument("model_tag", nargs="?")
    made.add_argument("--config")
    made.add_argument("--max-tokens", type=int, default=1)
    made.add_argument("--name", default="x")
    made.add_argument("--names", nargs="+")
    made.add_argument("--eager", action=argparse.BooleanOptionalAction, default=False)
    made.add_argument("--only-true", action="store_true")
    made.add_argument("--optimization-level", type=int)
    group = made.add_argument_group("Connector", "about connectors")
    group.add_argument("--kv-transfer-config", "-kt", type=json_value, help="the connector as JSON")
    made.add_argument("--origins", type=json_value)
    return made


@pytest.fixture
def logged(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog


def test_underscores_and_dashes_are_the_same_in_names_only(parser):
    args = parser.parse_args(["--max_tokens=3", "--name", "a_b"])
    assert (args.max_tokens, args.name) == (3, "a_b")
    assert normal_flag("--a_b.c_d=e_f") == "--a-b.c_d=e_f"
    assert normal_flag("plain_text") == "plain_text"


def test_booleans_have_a_negative_form(parser):
    assert parser.parse_args(["--eager"]).eager is True
    assert parser.parse_args(["--no-eager"]).eager is False


def test_dotted_parts_of_one_flag_make_one_object(parser):
    args = parser.parse_args(
        [
            "--kv-transfer-config.kv_role",
            "kv_both",
            "--kv_transfer_config.extra.cpu_bytes_to_use",
            "1073741824",
            "-kt.extra.lazy=true",
        ]
    )
    assert args.kv_transfer_config == {
        "kv_role": "kv_both",
        "extra": {"cpu_bytes_to_use": 1073741824, "lazy": True},
    }


def test_dotted_lists_are_appended(parser):
    args = parser.parse_args(["--kv-transfer-config.l+", "1", "--kv-transfer-config.l+=2,x"])
    assert args.kv_transfer_config == {"l": [1, 2, "x"]}


def test_dotted_values_are_laid_over_the_json_form(parser):
    args = parser.parse_args(
        ["--kv-transfer-config", '{"a": {"x": 1}, "b": 2k}', "--kv-transfer-config.a.y", "3"]
    )
    assert args.kv_transfer_config == {"a": {"x": 1, "y": 3}, "b": 2000}


def test_repeated_dotted_scalar_warns_and_last_wins(parser, logged):
    args = parser.parse_args(["--kv-transfer-config.a", "1", "--kv-transfer-config.a", "2"])
    assert args.kv_transfer_config == {"a": 2}
    assert "more than once" in logged.text


@pytest.mark.parametrize("spelling", [["-O3"], ["-O", "3"], ["-O=3"], ["--optimization-level", "3"]])
def test_optimization_level_spellings(parser, spelling):
    assert parser.parse_args(spelling).optimization_level == 3


def test_bad_json_is_a_usage_error(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["--kv-transfer-config", "{no"])
    assert "not valid JSON" in capsys.readouterr().err


def test_dotted_flag_without_value_is_a_usage_error(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["--kv-transfer-config.a"])
    assert "needs a value" in capsys.readouterr().err


def test_unknown_dotted_flag_is_reported(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["--unknown.a", "1"])
    assert "--unknown" in capsys.readouterr().err


def yaml_file(tmp_path, text, name="c.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_yaml_values_lose_against_flags_and_win_against_defaults(parser, tmp_path):
    path = yaml_file(
        tmp_path,
        "max-tokens: 5\nname: from_file\neager: true\nnames: [a, b]\nkv-transfer-config: {a: 1}\norigins: [u]\n",
    )
    args = parser.parse_args(["the-model", "--config", path, "--max-tokens", "9"])
    assert (args.model_tag, args.max_tokens, args.name, args.eager) == ("the-model", 9, "from_file", True)
    assert (args.names, args.kv_transfer_config, args.origins) == (["a", "b"], {"a": 1}, ["u"])


def test_yaml_model_is_used_unless_given(parser, tmp_path):
    path = yaml_file(tmp_path, "model: from-file\n", "c.yml")
    assert parser.parse_args([f"--config={path}"]).model_tag == "from-file"
    assert parser.parse_args(["mine", "--config", path]).model_tag == "mine"


def test_yaml_false_needs_a_negative_flag(parser, tmp_path, logged):
    path = yaml_file(tmp_path, "eager: false\nonly_true: false\nnames: []\nname: null\n")
    args = parser.parse_args(["--config", path])
    assert (args.eager, args.only_true, args.names, args.name) == (False, False, None, "x")
    assert "there is no --no-only-true" in logged.text


@pytest.mark.parametrize(("text", "name"), [("a: 1", "c.json"), ("[1]", "c.yaml"), ("a: [", "c.yaml")])
def test_bad_config_files_are_refused(parser, tmp_path, text, name):
    with pytest.raises(ValueError, match=name):
        parser.parse_args(["--config", yaml_file(tmp_path, text, name)])


def test_unknown_yaml_key_is_an_error(parser, tmp_path, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["--config", yaml_file(tmp_path, "no_such: true")])
    assert "--no-such" in capsys.readouterr().err


def test_config_twice_is_an_error(parser, tmp_path, capsys):
    path = yaml_file(tmp_path, "name: a")
    with pytest.raises(SystemExit):
        parser.parse_args(["--config", path, "--config", path])
    assert "once only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "shown", "hidden"),
    [
        ("Connector", "--kv-transfer-config", "--names"),
        ("names", "--names", "--eager"),
        ("json", "--kv-transfer-config", "--eager"),
        ("all", "--eager", "~"),
        ("listgroup", "Connector", "--eager"),
    ],
)
def test_help_can_be_searched(parser, capsys, word, shown, hidden):
    with pytest.raises(SystemExit) as stop:
        parser.parse_args([f"--help={word}"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert shown in out
    assert hidden not in out


def test_help_for_an_unknown_word_fails(parser):
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--help=zzz"])
    assert stop.value.code == 2


def test_a_parser_with_sub_commands_leaves_flags_to_them():
    main = FlexibleArgumentParser(prog="main")
    sub = main.add_subparsers(dest="command", parser_class=FlexibleArgumentParser).add_parser("go")
    sub.add_argument("--kv-config", "-kc", type=json.loads)
    assert main.parse_args(["go", "-kc.a", "1"]).kv_config == {"a": 1}


def test_help_shows_the_defaults_that_a_flag_has_of_its_own(capsys):
    made = FlexibleArgumentParser(prog="tool")
    made.add_argument("model_tag", nargs="?", default="m", help="The model.")
    made.add_argument("--share", type=float, default=0.25, help="A share.")
    made.add_argument("--eager", action="store_true", help="No graphs.")
    made.add_argument("--cache", action="store_true", default=True, help="Cache.")
    made.add_argument("--length", type=int, help="A length.")
    made.add_argument("--names", nargs="+", default=[], help="Names.")
    made.add_argument("--grpc", action="store_true", help="Not supported.")
    made.add_argument("--template", default="50%", help="A template.")
    with pytest.raises(SystemExit):
        made.parse_args(["--help"])
    shown = capsys.readouterr().out
    for text in (
        "A share. (default: 0.25)",
        "No graphs. (default: off)",
        "Cache. (default: on)",
        "A template. (default: 50%)",
    ):
        assert text in shown
    assert shown.count("default:") == 4


@pytest.mark.parametrize(
    ("flag", "said"),
    [("--max-token=3", "(did you mean --max-tokens?)"), ("--zzz", "unrecognized arguments: --zzz\n")],
)
def test_an_unknown_flag_is_answered_in_two_lines(parser, capsys, flag, said):
    with pytest.raises(SystemExit) as stop:
        parser.parse_args([flag])
    shown = capsys.readouterr().err
    assert stop.value.code == 2
    assert said in shown
    assert shown.count("\n") == 2
