"""A command-line parser with the project's spellings. Knows no setting. Layer: L0.

On top of argparse: `_` and `-` are the same in flag names, JSON flags may be written with dots
(`--kv-transfer-config.kv_role kv_both`), values may come from a YAML file, and help can be searched.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from vllm.logger import init_logger
from vllm.utils.human_numbers import human_readable_int, loads_json, parse_scalar

logger = init_logger(__name__)

__all__ = ["FlexibleArgumentParser", "human_readable_int", "json_value"]

OPTIMIZATION_FLAG = "--optimization-level"


def json_value(text: str) -> Any:
    """Type of a JSON flag. Raises `argparse.ArgumentTypeError` naming the fault."""
    try:
        return loads_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from error


def normal_flag(arg: str) -> str:
    """`--some_flag=a_b` → `--some-flag=a_b`; parts behind a dot and everything that is no flag stay as they are."""
    if not arg.startswith("--"):
        return arg
    name_end = min((i for i in (arg.find("="), arg.find(".")) if i >= 0), default=len(arg))
    return arg[:name_end].replace("_", "-") + arg[name_end:]


class _HelpFormatter(argparse.RawTextHelpFormatter):
    """Help with the default of each flag that has one of its own (None: the text says where the value comes from)."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = action.default
        silent = default is None or default == argparse.SUPPRESS or default in ("", [], {})
        if not text or silent or "not supported" in text.lower() or not action.option_strings:
            return text
        shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)
        return f"{text} (default: {shown.replace('%', '%%')})"


class FlexibleArgumentParser(argparse.ArgumentParser):
    """See the module's docstring. Flags are declared with dashes; abbreviations are not accepted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, **kwargs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        given = list(sys.argv[1:] if args is None else args)
        if self._subparsers is not None:
            return super().parse_known_args(given, namespace)  # the chosen sub-parser knows the flags
        prepared = _join_dotted(self, [_spell_optimization(normal_flag(arg)) for arg in given])
        self._answer_help_search(prepared)
        prepared = self._splice_config_file(prepared)
        return super().parse_known_args(prepared, namespace)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse does; an unknown flag is answered with the nearest known one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._nearest_flag(unknown)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """End with the message alone: the usage of a hundred flags would push it off the screen."""
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` lists the flags.\n")

    def _nearest_flag(self, unknown: Iterable[str]) -> str:
        for arg in unknown:
            near = difflib.get_close_matches(arg.partition("=")[0], self._option_string_actions, n=1)
            if arg.startswith("--") and near:
                return f" (did you mean {near[0]}?)"
        return ""

    # --- YAML ---------------------------------------------------------------------------------------------------

    def _splice_config_file(self, args: list[str]) -> list[str]:
        """Replace `--config FILE` by the file's flags, placed before all given flags so that those win."""
        if "--config" not in self._option_string_actions:
            return args
        positions = [i for i, arg in enumerate(args) if arg == "--config" or arg.startswith("--config=")]
        if not positions:
            return args
        if len(positions) > 1:
            self.error("--config may be given once only")
        at = positions[0]
        inline = args[at].partition("=")[2]
        if not inline and at + 1 >= len(args):
            self.error("--config needs a file name")
        path = inline or args[at + 1]
        rest = args[:at] + args[at + (1 if inline else 2) :]
        first_flag = next((i for i, arg in enumerate(rest) if arg.startswith("-")), len(rest))
        return (
            rest[:first_flag] + self.flags_from_yaml(path, has_positional=first_flag > 0) + rest[first_flag:]
        )

    def flags_from_yaml(self, path: str, has_positional: bool) -> list[str]:
        """The flags that the YAML file at `path` stands for.

        Raises ValueError for another suffix, an unreadable file, or a file that holds no mapping.
        """
        values = _read_yaml_mapping(path)
        flags: list[str] = []
        for key, value in values.items():
            if key in ("model", "model_tag", "model-tag") and self._has_positional():
                flags = flags if has_positional else [str(value), *flags]
            else:
                flags += self._flag_from_yaml(f"--{key}".replace("_", "-"), value)
        return flags

    def _has_positional(self) -> bool:
        return any(not action.option_strings for action in self._actions)

    def _flag_from_yaml(self, flag: str, value: Any) -> list[str]:
        if value is None:
            return []
        if isinstance(value, bool):
            return self._boolean_from_yaml(flag, value)
        if isinstance(value, dict):
            return [flag, json.dumps(value)]
        if isinstance(value, list):
            action = self._option_string_actions.get(flag)
            if action is not None and action.nargs is None:
                return [flag, json.dumps(value)]
            return [flag, *map(str, value)] if value else []
        return [flag, str(value)]

    def _boolean_from_yaml(self, flag: str, value: bool) -> list[str]:
        if value:
            return [flag]
        negative = f"--no-{flag.removeprefix('--')}"
        if negative in self._option_string_actions:
            return [negative]
        if flag not in self._option_string_actions:
            return [flag]  # reported as unknown by the parser itself
        logger.warning_once("%s: false in the config file has no effect: there is no %s", flag, negative)
        return []

    # --- help ---------------------------------------------------------------------------------------------------

    def _answer_help_search(self, args: Iterable[str]) -> None:
        for arg in args:
            if arg.startswith(("--help=", "-h=")):
                self._print_help_for(arg.partition("=")[2])

    def _print_help_for(self, word: str) -> NoReturn:
        if word in ("all", "page"):
            self.print_help()
            self.exit()
        if word == "listgroup":
            for group in self._action_groups:
                print(f"{group.title}: {group.description or ''}".rstrip(": "))
            self.exit()
        wanted = word.lower().lstrip("-").replace("_", "-")
        chosen = [group for group in self._action_groups if (group.title or "").lower() == word.lower()]
        actions = [action for group in chosen for action in group._group_actions]
        if not actions:
            actions = [action for action in self._actions if _mentions(action, wanted)]
        if not actions:
            self.error(f"no group, flag or keyword {word!r}; try --help=listgroup")
        formatter = self._get_formatter()
        formatter.start_section(chosen[0].title if chosen else f"flags matching {word!r}")
        formatter.add_arguments(actions)
        formatter.end_section()
        print(formatter.format_help())
        self.exit()


def _mentions(action: argparse.Action, word: str) -> bool:
    return any(word in option for option in action.option_strings) or word in (action.help or "").lower()


def _spell_optimization(arg: str) -> str:
    """`-O3` and `-O=3` → `--optimization-level=3`; `-O` → `--optimization-level`."""
    if not arg.startswith("-O"):
        return arg
    level = arg[2:].removeprefix("=")
    if level and not level.isdigit():
        return arg
    return f"{OPTIMIZATION_FLAG}={level}" if level else OPTIMIZATION_FLAG


def _read_yaml_mapping(path: str) -> dict[str, Any]:
    import yaml

    if Path(path).suffix not in (".yaml", ".yml"):
        raise ValueError(f"Config file must be of a .yaml/.yml type, got {path!r}")
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"Config file {path!r} cannot be read: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"Config file {path!r} must hold a mapping of flags to values")
    return values


# --- dotted JSON flags ------------------------------------------------------------------------------------------


class _DottedValues:
    """Collects the dotted parts of all flags, per flag one nested dict."""

    def __init__(self) -> None:
        self.by_flag: dict[str, dict[str, Any]] = {}

    def put(self, flag: str, path: list[str], value: str, append: bool) -> None:
        node = self.by_flag.setdefault(flag, {})
        for key in path[:-1]:
            child = node.setdefault(key, {})
            if not isinstance(child, dict):
                logger.warning("%s.%s: the earlier value of %r is replaced", flag, ".".join(path), key)
                child = node[key] = {}
            node = child
        key = path[-1]
        if append:
            items = node.get(key)
            node[key] = [*(items if isinstance(items, list) else []), *map(parse_scalar, value.split(","))]
            return
        if key in node:
            logger.warning("%s.%s is given more than once; the last value wins", flag, ".".join(path))
        node[key] = parse_scalar(value)


def _join_dotted(parser: argparse.ArgumentParser, args: list[str]) -> list[str]:
    """Replace `--flag.a.b value` parts by one `--flag JSON`, merged with a `--flag JSON` that is there too."""
    collected = _DottedValues()
    rest: list[str] = []
    i = 0
    while i < len(args):
        parts = _split_dotted(parser, args[i])
        if parts is None:
            rest.append(args[i])
            i += 1
            continue
        flag, path, inline, append = parts
        if inline is None:
            i += 1
            if i >= len(args):
                parser.error(f"{args[i - 1]} needs a value")
            inline = args[i]
        collected.put(flag, path, inline, append)
        i += 1
    for flag, values in collected.by_flag.items():
        rest = _merge_into(parser, rest, flag, values)
    return rest


def _split_dotted(
    parser: argparse.ArgumentParser, arg: str
) -> tuple[str, list[str], str | None, bool] | None:
    """`--flag.a.b+=v` → (`--flag`, [a, b], v, True); None for anything that is no dotted flag."""
    if not arg.startswith("-"):
        return None
    name, equals, value = arg.partition("=")
    flag, dot, keys = name.partition(".")
    action = parser._option_string_actions.get(flag)
    if not dot or not keys or (action is None and not flag.startswith("--")):
        return None
    if action is None and not _looks_like_flag(flag):
        return None
    append = keys.endswith("+")
    long_flag = (
        flag if action is None else next((o for o in action.option_strings if o.startswith("--")), flag)
    )
    return long_flag, keys.removesuffix("+").split("."), value if equals else None, append


def _looks_like_flag(flag: str) -> bool:
    return flag[2:3].isalpha()


def _merge_into(
    parser: argparse.ArgumentParser, args: list[str], flag: str, values: dict[str, Any]
) -> list[str]:
    action = parser._option_string_actions.get(flag)
    spellings = (flag,) if action is None else tuple(action.option_strings)
    for i, arg in enumerate(args):
        name, equals, inline = arg.partition("=")
        if name not in spellings:
            continue
        text = inline if equals else args[i + 1] if i + 1 < len(args) else "{}"
        try:
            present = loads_json(text)
        except ValueError:
            break
        if isinstance(present, dict):
            merged = [flag, json.dumps(_deep_merge(present, values))]
            return args[:i] + merged + args[i + (1 if equals else 2) :]
    return [*args, flag, json.dumps(values)]


def _deep_merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        present = result.get(key)
        both_objects = isinstance(present, dict) and isinstance(value, dict)
        result[key] = _deep_merge(result[key], value) if both_objects else value
    return result
