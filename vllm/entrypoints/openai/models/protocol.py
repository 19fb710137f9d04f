"""Bodies of `/v1/models`, and where served names come from. Layer: L8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field


@dataclass(frozen=True)
class BaseModelPath:
    """A served name and the model behind it."""

    name: str
    model_path: str


@dataclass(frozen=True)
class LoRAModulePath:
    """A served adapter."""

    name: str
    path: str
    base_model_name: str | None = None


class ModelPermission(BaseModel):
    """Kept for clients that read it; nothing is ever restricted here."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(BaseModel):
    """One served name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vllm"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    permission: list[ModelPermission] = Field(default_factory=list)


class ModelList(BaseModel):
    """All served names."""

    object: Literal["list"] = "list"
    data: list[ModelCard] = Field(default_factory=list)
