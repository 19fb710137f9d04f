"""Finds a model's small files and reads its configuration into a plain record, without a model library. Layer: L1.

A model is a folder, a GGUF file, a folder with one GGUF file, or a repository id that is in the local cache or can be
downloaded. Only `config.json` and `generation_config.json` (or GGUF metadata) are read here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.transformers_utils.config_defaults import with_defaults
from vllm.transformers_utils.config_record import ConfigRecord
from vllm.transformers_utils.gguf_config import config_from_gguf
from vllm.transformers_utils.gguf_metadata import is_gguf_file

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are looked for: name or path, revision, token and download folder."""

    model: str
    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | None = None


def find_gguf_file(model: str) -> Path | None:
    """The GGUF file that `model` names: the file itself, or the only `*.gguf` of a folder without `config.json`."""
    path = Path(model).expanduser()
    if is_gguf_file(path):
        return path
    if not path.is_dir() or (path / CONFIG_NAME).exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ValueError(
            f"{model} holds {len(files)} GGUF files; name one of them: {', '.join(f.name for f in files)}"
        )
    return files[0] if files else None


def find_model_file(source: ModelSource, name: str) -> Path | None:
    """The local path of file `name` of the model, downloaded if need be; None if the model has no such file.

    Raises ValueError if the model is neither a local path nor a repository that can be reached.
    """
    folder = Path(source.model).expanduser()
    if folder.is_dir():
        path = folder / name
        return path if path.is_file() else None
    if folder.is_file():
        return None
    return _find_in_repository(source, name)


def _find_in_repository(source: ModelSource, name: str) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(
            hf_hub_download(
                source.model, name, revision=source.revision, token=source.token, cache_dir=source.cache_dir
            )
        )
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"Model {source.model!r} is neither a local folder nor in the local cache, and {name} cannot be downloaded"
        ) from error
    except EntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ValueError(
            f"Model {source.model!r} is neither a local folder nor the name of a repository"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"Model {source.model!r} is neither a local folder nor a reachable repository: {error}"
        ) from error


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values


def get_config(source: ModelSource) -> ConfigRecord:
    """The model's configuration, with the defaults of its family where the file has none.

    Raises ValueError if there is no configuration or it cannot be read.
    """
    gguf_file = find_gguf_file(source.model)
    if gguf_file is not None:
        return config_from_gguf(gguf_file)
    path = find_model_file(source, CONFIG_NAME)
    if path is None:
        raise ValueError(f"Model {source.model!r} has no {CONFIG_NAME}")
    return ConfigRecord(with_defaults(_read_json_object(path)))


def get_generation_config(source: ModelSource) -> dict[str, Any]:
    """The model's generation defaults; empty if it has none."""
    try:
        path = find_model_file(source, GENERATION_CONFIG_NAME)
    except ValueError:
        # A cached repository without this file cannot be told from one whose file was never fetched.
        return {}
    return {} if path is None else _read_json_object(path)
