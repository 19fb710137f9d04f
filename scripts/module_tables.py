"""Writes the module tables of docs/design/architecture.md from the tree: layer by layer, file and responsibility.

The layer comes from tests/tidy/layers.toml, the responsibility is the first sentence of the module's docstring. Run it
after files came, went or changed their purpose.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.tidy.source_tree import Layer, Module, is_trivial, layer_of, modules  # noqa: E402

DOCUMENT = ROOT / "docs/design/architecture.md"
START, END = "<!-- modules: written by scripts/module_tables.py -->", "<!-- end of modules -->"


def responsibility(module: Module) -> str:
    """The first sentence of the docstring, without its word about the layer."""
    text = " ".join((ast.get_docstring(module.tree) or "").split())
    first = re.split(r"(?<=[a-z)`’\d'\"])\. |\s*Layer:? L\d", text)[0]
    return first.rstrip(".;").replace("|", "\\|")


def tables() -> str:
    """One table per layer; modules of one folder stay together."""
    by_layer: dict[int, list[Module]] = {}
    layers: dict[int, Layer] = {}
    for module in modules().values():
        layer = layer_of(module.relative)
        if layer is None or is_trivial(module):
            continue
        layers[layer.rank] = layer
        by_layer.setdefault(layer.rank, []).append(module)
    parts = []
    for rank in sorted(by_layer):
        rows = [
            f"| {module.relative.removeprefix('vllm/')} | {responsibility(module)} |"
            for module in sorted(by_layer[rank], key=lambda m: (str(m.path.parent), m.path.name))
        ]
        head = f"**{layers[rank].name}**" + (
            " — strict: plain deterministic Python" if layers[rank].strict else ""
        )
        parts.append("\n".join([head, "", "| module | responsibility |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def main() -> None:
    """Replaces what stands between the two marks."""
    text = DOCUMENT.read_text()
    before, rest = text.split(START)
    after = rest.split(END)[1]
    DOCUMENT.write_text(f"{before}{START}\n\n{tables()}\n\n{END}{after}")


if __name__ == "__main__":
    main()
