"""Reads the header of a GGUF file: its metadata and its table of tensors, never the tensor bytes. Layer: L1.

Knows the container format only; what a tensor type means is the weight loader's business.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

MAGIC: Final = b"GGUF"
SUPPORTED_VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
_MAX_STRING_BYTES: Final = 1 << 26
_MAX_ITEMS: Final = 1 << 28

# Value types of the metadata by their number in the file.
_SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING: Final = 8
_ARRAY: Final = 9


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """One tensor: name, dimensions (fastest first, as stored), type number, byte offset from `data_offset`."""

    name: str
    dimensions: tuple[int, ...]
    type_number: int
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions, slowest first."""
        return self.dimensions[::-1]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dimensions)


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The header of one file. `data_offset` is where the tensor data starts, in bytes from the start of the file."""

    path: Path
    # Values of the file: numbers, strings, booleans, and lists of them.
    metadata: dict[str, Any]
    tensors: tuple[GGUFTensorInfo, ...]
    data_offset: int


class _Reader:
    """Little-endian reads with a clear error at the end of the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file

    def bytes(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) != count:
            raise ValueError(f"{self._path}: the GGUF header is cut off")
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.bytes(struct.calcsize(form)))[0]

    def count(self, limit: int = _MAX_ITEMS) -> int:
        value: int = self.number("<Q")
        if value > limit:
            raise ValueError(f"{self._path}: the GGUF header claims {value} items, more than {limit}")
        return value

    def text(self) -> str:
        return self.bytes(self.count(_MAX_STRING_BYTES)).decode("utf-8", errors="replace")

    def value(self, type_number: int) -> Any:
        if type_number == _STRING:
            return self.text()
        if type_number == _ARRAY:
            return self._array()
        form = _SCALARS.get(type_number)
        if form is None:
            raise ValueError(f"{self._path}: unknown GGUF value type {type_number}")
        return self.number(form)

    def _array(self) -> list[Any]:
        item_type: int = self.number("<I")
        count = self.count()
        form = _SCALARS.get(item_type)
        if form is None:
            return [self.value(item_type) for _ in range(count)]
        packed = f"<{count}{form[1:]}"
        return list(struct.unpack(packed, self.bytes(struct.calcsize(packed))))

    def tensor(self) -> GGUFTensorInfo:
        name = self.text()
        rank: int = self.number("<I")
        dimensions = tuple(self.number("<Q") for _ in range(rank))
        return GGUFTensorInfo(name, dimensions, self.number("<I"), self.number("<Q"))

    def position(self) -> int:
        return self._file.tell()


def is_gguf_file(path: Path) -> bool:
    """Whether `path` is a file that starts like a GGUF file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf_header(path: str | Path) -> GGUFHeader:
    """Read the header of the GGUF file at `path`. Raises ValueError if it is not one, OSError if it cannot be read."""
    path = Path(path)
    with path.open("rb") as file:
        reader = _Reader(path, file)
        if reader.bytes(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path} is not a GGUF file")
        version: int = reader.number("<I")
        if version not in SUPPORTED_VERSIONS:
            raise ValueError(
                f"{path}: GGUF version {version} is not supported; supported: {SUPPORTED_VERSIONS}"
            )
        num_tensors, num_values = reader.count(), reader.count()
        metadata = {reader.text(): reader.value(reader.number("<I")) for _ in range(num_values)}
        tensors = tuple(reader.tensor() for _ in range(num_tensors))
        alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        data_offset = -(-reader.position() // alignment) * alignment
    return GGUFHeader(path, metadata, tensors, data_offset)
