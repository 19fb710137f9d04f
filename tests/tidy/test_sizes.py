"""File and function sizes: a file has at most 500 lines, a function at most 70."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.tidy.source_tree import ROOT, modules

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70


def _python_files() -> list[Path]:
    folders = ("vllm", "tests", "benchmarks", "examples", "scripts")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_files_have_at_most_500_lines() -> None:
    native = [
        path for pattern in ("*.cpp", "*.cu", "*.h", "*.cuh") for path in (ROOT / "csrc").rglob(pattern)
    ]
    sizes = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in _python_files() + native
    }
    assert not {name: size for name, size in sizes.items() if size > FILE_LINES_MAX}


def test_functions_have_at_most_70_lines() -> None:
    long = []
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > FUNCTION_LINES_MAX:
                    long.append(f"{module.relative}:{node.lineno} {node.name}: {size} lines")
    assert not long, "\n".join(long)
