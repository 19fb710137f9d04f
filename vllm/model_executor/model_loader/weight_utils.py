"""Finds weight files and streams tensors out of them, with progress.

Owns: which files of a folder or repository hold the weights, reading safetensors. Must not know: models. Layer L6.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from vllm.model_executor.layers.sharding import Part
from vllm.transformers_utils.config import ModelSource, find_model_file

__all__ = ["SafetensorsWeight", "find_safetensors", "iter_safetensors"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def find_safetensors(source: ModelSource) -> list[Path]:
    """The weight files of a model, in order; downloaded if the model is a repository.

    An index file decides where there is one, so that a second copy of the weights in the folder is not read.
    `ValueError` if there are none, or if a file that the index names is missing.
    """
    index = find_model_file(source, _INDEX)
    if index is not None:
        files = []
        for name in _names_in(index):
            path = find_model_file(source, name)
            if path is None:
                raise ValueError(f"Model {source.model!r}: {_INDEX} names {name}, which does not exist")
            files.append(path)
        return files
    single = find_model_file(source, _SINGLE)
    if single is not None:
        return [single]
    folder = Path(source.model).expanduser()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        raise ValueError(f"Model {source.model!r} has no safetensors weights")
    return files


def _names_in(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if all(isinstance(name, str) for name in names):
            return sorted(names)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files: {error!r}") from error
    raise ValueError(f"{index} is no index of safetensors files: weight_map must map names to names")


class SafetensorsWeight:
    """A tensor of an open file; only what is asked for is read. `ValueError` if that fails."""

    def __init__(self, path: Path, file: Any, name: str) -> None:
        self._path, self._file, self._name = path, file, name
        self._slice = file.get_slice(name)
        self.shape = tuple(self._slice.get_shape())

    def __getitem__(self, part: Part, /) -> Tensor:
        try:
            tensor: Tensor = self._slice[part] if part else self._file.get_tensor(self._name)
        except (OSError, SafetensorError) as error:
            raise _unreadable(self._path, error) from error
        return tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all of it; types are named by their bits ("BF16"), truth values take a byte."""
        bits = re.search(r"\d+", self._slice.get_dtype())
        return math.prod(self.shape) * (int(bits.group()) if bits else 8) // 8


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} cannot be read as safetensors: {error}")


def iter_safetensors(
    files: list[Path], show_progress: bool = True
) -> Iterator[tuple[str, SafetensorsWeight]]:
    """Yields every tensor of every file, to be read before the next one; the bar counts bytes.

    `ValueError` for a file that cannot be read.
    """
    total = sum(path.stat().st_size for path in files)
    with tqdm(
        total=total,
        desc="Loading weights",
        unit="B",
        unit_scale=True,
        disable=None if show_progress else True,
    ) as bar:
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (not a mapping)
                        weight = SafetensorsWeight(path, file, name)
                        yield name, weight
                        bar.update(weight.nbytes)
            except (OSError, SafetensorError) as error:
                raise _unreadable(path, error) from error
