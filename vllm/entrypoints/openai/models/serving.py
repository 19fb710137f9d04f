"""Which names are served, and whether a request's name is one of them. Layer: L8."""

from __future__ import annotations

from typing import Any

from vllm import envs
from vllm.entrypoints.openai.models.protocol import BaseModelPath, ModelCard, ModelList, ModelPermission
from vllm.exceptions import VLLMNotFoundError
from vllm.utils.clock import Clock, MonotonicClock
from vllm.utils.ids import random_uuid


class OpenAIServingModels:
    """The served names of one engine."""

    def __init__(
        self, engine_client: Any, base_model_paths: list[BaseModelPath], *, clock: Clock | None = None
    ) -> None:
        self.engine_client = engine_client
        self.base_model_paths = base_model_paths
        self._created = int((clock or MonotonicClock()).time())

    def is_base_model(self, name: str | None) -> bool:
        """Whether `name` is served."""
        return any(path.name == name for path in self.base_model_paths)

    def model_name(self) -> str:
        """The name that replies state: the first served one."""
        return self.base_model_paths[0].name

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound (404) unless `name` is served; a request may leave the name out."""
        if name and not envs.VLLM_SKIP_MODEL_NAME_VALIDATION and not self.is_base_model(name):
            raise ModelNotFoundError(name)

    async def show_available_models(self) -> ModelList:
        """The list of served names."""
        max_model_len = self.engine_client.vllm_config.model_config.max_model_len
        return ModelList(
            data=[
                ModelCard(
                    id=path.name,
                    created=self._created,
                    root=path.model_path,
                    max_model_len=max_model_len,
                    permission=[ModelPermission(id=f"modelperm-{random_uuid()}", created=self._created)],
                )
                for path in self.base_model_paths
            ]
        )


class ModelNotFoundError(VLLMNotFoundError):
    """A request names a model that is not served."""

    parameter = "model"

    def __init__(self, name: str) -> None:
        super().__init__(f"The model `{name}` does not exist.")
