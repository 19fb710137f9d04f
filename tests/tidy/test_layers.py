"""Layers and cycles: every module has a layer and imports only downwards, visibly, and without cycles."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.tidy.source_tree import ROOT, Import, Module, is_trivial, layer_of, modules


def first_party(module: Module) -> list[Import]:
    known = modules()
    return [
        imported
        for imported in module.imports
        if imported.module.split(".")[0] == "vllm" and imported.module in known
    ]


def test_every_module_has_a_layer() -> None:
    unlisted = [m.relative for m in modules().values() if not is_trivial(m) and layer_of(m.relative) is None]
    assert not unlisted, f"add to tests/tidy/layers.toml: {unlisted}"


def test_every_first_party_import_exists() -> None:
    missing = [
        f"{m.relative}:{i.line} imports {i.module}"
        for m in modules().values()
        for i in m.imports
        if i.module.split(".")[0] == "vllm" and i.module not in modules()
    ]
    assert not missing, "\n".join(missing)


def test_imports_point_downwards() -> None:
    wrong = []
    for module in modules().values():
        own = layer_of(module.relative)
        for imported in first_party(module):
            target = layer_of(modules()[imported.module].relative)
            if own is not None and target is not None and target.rank > own.rank:
                wrong.append(
                    f"{module.relative}:{imported.line} ({own.name}) imports {imported.module} ({target.name})"
                )
    assert not wrong, "\n".join(wrong)


def test_no_hidden_first_party_imports() -> None:
    hidden = [
        f"{module.relative}:{imported.line} imports {imported.module} in a {imported.inside}"
        for module in modules().values()
        for imported in first_party(module)
        if imported.inside != "module"
    ]
    assert not hidden, "\n".join(hidden)


def _edges() -> dict[str, set[str]]:
    """Import graph; importing a.b.c also runs the packages a and a.b, so their code counts too."""
    known = modules()
    graph: dict[str, set[str]] = {}
    for module in known.values():
        targets: set[str] = set()
        for imported in first_party(module):
            parts = imported.module.split(".")
            targets |= {".".join(parts[:n]) for n in range(2, len(parts) + 1)}
        own = module.name.split(".")
        ancestors = {".".join(own[:n]) for n in range(1, len(own) + 1)}
        graph[module.name] = {t for t in targets - ancestors if t in known and not is_trivial(known[t])}
    return graph


def test_import_graph_has_no_cycle() -> None:
    graph = _edges()
    state: dict[str, int] = {}
    path: list[str] = []

    def visit(name: str) -> list[str] | None:
        state[name] = 1
        path.append(name)
        for target in sorted(graph[name]):
            if state.get(target) == 1:
                return path[path.index(target) :] + [target]
            if target not in state and (found := visit(target)):
                return found
        state[name] = 2
        path.pop()
        return None

    for name in sorted(graph):
        if name not in state:
            cycle = visit(name)
            assert cycle is None, " -> ".join(cycle or [])


@pytest.mark.parametrize(
    "module",
    [
        "vllm",
        "vllm.v1.core.sched.scheduler",
        "vllm.v1.simple_kv_offload.manager",
        "vllm.entrypoints.cli.main",
    ],
)
def test_brain_does_not_import_torch_or_transformers(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"
