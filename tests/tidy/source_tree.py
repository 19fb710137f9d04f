"""The source tree as data for the tidy tests: modules, their layers, their imports.

Pure standard library, nothing is imported from `vllm`, so that a broken module cannot hide itself from these tests.
"""

from __future__ import annotations

import ast
import fnmatch
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Layer:
    name: str
    rank: int
    strict: bool


@dataclass(frozen=True)
class Import:
    """One import statement: the module it names, its line, and where it stands."""

    module: str
    line: int
    inside: str  # "module", "function" or "TYPE_CHECKING"


@dataclass
class Module:
    """One source file with its dotted name, parsed tree and imports."""

    path: Path
    name: str
    tree: ast.Module
    imports: list[Import] = field(default_factory=list)

    @property
    def relative(self) -> str:
        return self.path.relative_to(ROOT).as_posix()


def _matches(path: str, pattern: str) -> bool:
    if "**" in pattern:
        head, tail = pattern.split("**", 1)
        return path.startswith(head) and path.endswith(tail)
    return fnmatch.fnmatchcase(path, pattern) and path.count("/") == pattern.count("/")


@cache
def _rules() -> list[tuple[str, Layer]]:
    data = tomllib.loads((ROOT / "tests/tidy/layers.toml").read_text())
    layers = {entry["name"]: Layer(entry["name"], entry["rank"], entry["strict"]) for entry in data["layer"]}
    by_short = {name.split()[0]: layer for name, layer in layers.items()}
    rules: list[tuple[str, Layer]] = []
    for entry in data["layer"]:
        for pattern in entry["paths"]:
            path, _, other = pattern.partition(":")
            rules.append((path, by_short[other] if other else layers[entry["name"]]))
    return rules


def layer_of(path: str) -> Layer | None:
    """The layer of a file path below the root, or None when no pattern names it."""
    return next((layer for pattern, layer in _rules() if _matches(path, pattern)), None)


class _ImportCollector(ast.NodeVisitor):
    def __init__(self, module: Module) -> None:
        self.module = module
        self.where = ["module"]

    def _nested(self, node: ast.AST, where: str) -> None:
        self.where.append(where)
        self.generic_visit(node)
        self.where.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._nested(node, "function")

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._nested(node, "function")

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.dump(node.test):
            self._nested(node, "TYPE_CHECKING")
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            package = self.module.name.split(".")
            if self.module.path.name != "__init__.py":
                package = package[:-1]
            package = package[: len(package) - node.level + 1]
            base = ".".join([*package, base] if base else package)
        for alias in node.names:
            full = f"{base}.{alias.name}"
            self._add(full if _is_module(full) else base, node.lineno)

    def _add(self, name: str, line: int) -> None:
        inside = "TYPE_CHECKING" if "TYPE_CHECKING" in self.where else self.where[-1]
        self.module.imports.append(Import(name, line, inside))


def _is_module(name: str) -> bool:
    base = ROOT / name.replace(".", "/")
    return base.with_suffix(".py").exists() or (base / "__init__.py").exists()


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Module]:
    """Every module below `vllm/`, by dotted name."""
    found: dict[str, Module] = {}
    for path in sorted((ROOT / "vllm").rglob("*.py")):
        module = Module(path, _module_name(path), ast.parse(path.read_text(), str(path)))
        _ImportCollector(module).visit(module.tree)
        found[module.name] = module
    return found


def is_trivial(module: Module) -> bool:
    """An `__init__.py` without code (a docstring at most): it belongs to no layer."""
    body = [node for node in module.tree.body if not isinstance(node, ast.Expr)]
    return module.path.name == "__init__.py" and not body
