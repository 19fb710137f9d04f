"""Conventions that a parser can see: banned imports, module docstrings, unfinished work, settings with doc and reader."""

from __future__ import annotations

import ast
import re

from tests.tidy.source_tree import ROOT, is_trivial, layer_of, modules

BANNED_IN_BRAIN = {
    "asyncio", "concurrent", "multiprocessing", "random", "secrets", "select", "socket", "subprocess",
    "threading", "time", "torch", "transformers", "zmq",
}  # fmt: skip


def test_brain_imports_no_muscles() -> None:
    wrong = []
    for module in modules().values():
        layer = layer_of(module.relative)
        if layer is None or not layer.strict:
            continue
        for imported in module.imports:
            if imported.module.split(".")[0] in BANNED_IN_BRAIN:
                wrong.append(f"{module.relative}:{imported.line} imports {imported.module}")
    assert not wrong, "\n".join(wrong)


def test_brain_reads_no_environment_and_hashes_no_text() -> None:
    wrong = []
    for module in modules().values():
        layer = layer_of(module.relative)
        if layer is None or not layer.strict:
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}:
                wrong.append(f"{module.relative}:{node.lineno} reads the environment")
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_owns() -> None:
    silent = [
        m.relative for m in modules().values() if not is_trivial(m) and ast.get_docstring(m.tree) is None
    ]
    assert not silent, f"no module docstring: {silent}"


def test_init_files_only_reexport() -> None:
    wrong = []
    for module in modules().values():
        if module.path.name != "__init__.py":
            continue
        for node in module.tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in {"__getattr__", "__dir__"}:
                continue
            if not isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.Expr):
                wrong.append(f"{module.relative}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


def test_no_unfinished_work_is_marked_in_the_source() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    found = []
    for folder in ("vllm", "csrc", "tests", "scripts", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in {".py", ".cpp", ".cu", ".h", ".sh"} or path.name == "test_conventions.py":
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if pattern.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}")
    assert not found, "\n".join(found)


def test_no_test_is_skipped_without_a_condition() -> None:
    pattern = re.compile(r"pytest\.mark\.(skip|xfail)\b(?!if)|@unittest\.skip|pytest\.xfail\(")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line) and path.name != "test_conventions.py"
    ]
    assert not found, "\n".join(found)


def _config_fields() -> list[tuple[str, str, int, bool]]:
    """(file, field, line, has a doc string after it) of every annotated field of a class in config/."""
    fields = []
    for module in modules().values():
        if not module.relative.startswith("vllm/config/"):
            continue
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ClassDef) or not node.name.endswith("Config"):
                continue
            for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
                if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                    continue
                name = statement.target.id
                if name.startswith("_") or "ClassVar" in ast.dump(statement.annotation):
                    continue
                documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                value = statement.value
                documented |= isinstance(value, ast.Call) and any(k.arg == "doc" for k in value.keywords)
                fields.append((module.relative, name, statement.lineno, documented))
    return fields


def test_every_setting_has_a_doc() -> None:
    silent = [f"{path}:{line} {name}" for path, name, line, documented in _config_fields() if not documented]
    assert not silent, "\n".join(silent)


# Fields of the public interface that only outside code reads.
READ_OUTSIDE = {"encoder_cache_size", "target_model_config", "target_parallel_config"}


def test_every_setting_has_a_reader() -> None:
    read: set[str] = set()
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                read.add(node.value)
    unread = [
        f"{path}:{line} {name}" for path, name, line, _ in _config_fields() if name not in read | READ_OUTSIDE
    ]
    assert not unread, "\n".join(unread)
