"""Physical order of the KV cache's axes, and the strides that follow from it. Numbers only. Layer: L2.

Axes: L layer, B block, H head, N state (token row), C content (bytes of one state of one head).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

LOGICAL_AXES = "LBHNC"


class KVCacheLayout(StrEnum):
    """Each name lists the axes from the outermost to the innermost."""

    LBHNC = "LBHNC"
    LBNHC = "LBNHC"
    LHBNC = "LHBNC"
    BLHNC = "BLHNC"
    BLNHC = "BLNHC"
    BHLNC = "BHLNC"

    @classmethod
    def from_name(cls, name: str) -> KVCacheLayout:
        """The layout of that name or alias (`NHD`, `HND`). ValueError otherwise."""
        resolved = _ALIASES.get(name, name)
        if resolved not in cls.__members__:
            known = ", ".join([*cls.__members__, *_ALIASES])
            raise ValueError(f"Unknown KV cache layout {name!r}; known: {known}")
        return cls[resolved]

    @property
    def is_layer_compact(self) -> bool:
        """All bytes of one layer are one dense range."""
        return self.value[0] == "L"

    @property
    def is_block_compact(self) -> bool:
        """All bytes of one block of one layer are one dense range."""
        return set(self.value[2:]) == set("HNC")

    @property
    def is_block_contiguous(self) -> bool:
        """Pages of consecutive blocks of one layer follow each other without gaps."""
        return self.value[:2] == "LB"

    @property
    def is_block_outermost(self) -> bool:
        """All bytes of one block over all layers are one dense range."""
        return self.value[0] == "B"

    @property
    def stride_order(self) -> tuple[int, ...]:
        """For each physical position, outermost first, the index of the logical axis (L, B, H, N, C)."""
        return tuple(LOGICAL_AXES.index(axis) for axis in self.value)

    @property
    def layer_view_order(self) -> tuple[int, ...]:
        """As `stride_order` for one layer's logical axes (B, H, N, C)."""
        return tuple("BHNC".index(axis) for axis in self.value if axis != "L")


_ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}


@dataclass(frozen=True, slots=True)
class LayoutShape:
    """Sizes of the axes of same-shaped layers; `content` in bytes."""

    layers: int
    blocks: int
    heads: int
    states: int
    content: int

    def of(self, axis: str) -> int:
        """Size of one axis by its letter."""
        sizes = {"L": self.layers, "B": self.blocks, "H": self.heads, "N": self.states, "C": self.content}
        return sizes[axis]

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.heads * self.states * self.content


@dataclass(frozen=True, slots=True)
class KVCacheView:
    """One layer inside the allocation: byte offset, then size and byte stride of the axes (B, H, N, C)."""

    offset: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]


def compute_layout_strides(layout: KVCacheLayout, shape: LayoutShape) -> dict[str, int]:
    """Dense byte stride of each axis, by its letter."""
    strides: dict[str, int] = {}
    step = 1
    for axis in reversed(layout.value):
        strides[axis] = step
        step *= shape.of(axis)
    return strides


def create_kv_cache_views(
    layout: KVCacheLayout, shape: LayoutShape, offset: int = 0, block_stride: int | None = None
) -> list[KVCacheView]:
    """One numeric view per layer. `block_stride` replaces the dense one where blocks are wider than these layers."""
    strides = compute_layout_strides(layout, shape)
    if block_stride is not None:
        if not layout.is_block_outermost:
            raise ValueError(f"a block stride needs a block-outermost layout, got {layout}")
        if block_stride < strides["B"]:
            raise ValueError(f"block stride {block_stride} is smaller than the block's {strides['B']} bytes")
        strides["B"] = block_stride
    return [
        KVCacheView(
            offset + layer * strides["L"],
            (shape.blocks, shape.heads, shape.states, shape.content),
            (strides["B"], strides["H"], strides["N"], strides["C"]),
        )
        for layer in range(shape.layers)
    ]
