"""The table of offloading specs: name → class, loaded only when it is chosen.

Owns registration and look-up. It must not import any spec. Layer L2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.utils.registry import Registry, resolve_object
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.config import OffloadingConfig

DEFAULT_SPEC = "CPUOffloadingSpec"
_SPECS = Registry("Offloading spec", {DEFAULT_SPEC: "vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec"})


class OffloadingSpecFactory:
    """Finds specs by ``spec_name`` and ``spec_module_path`` of ``kv_connector_extra_config``."""

    @classmethod
    def register_spec(cls, name: str, module_path: str, class_name: str) -> None:
        """Add a spec under ``name``; its module loads on first use. ``ValueError`` if the name is taken."""
        _SPECS.register(name, f"{module_path}:{class_name}")

    @classmethod
    def is_registered(cls, name: object) -> bool:
        """Whether a spec of this name is in the table."""
        return name in _SPECS

    # The values come from the user's JSON, so anything may be in them.
    @classmethod
    def get_spec_cls(cls, extra: Mapping[str, Any]) -> type[OffloadingSpec]:
        """The class that these settings name. ``ValueError`` if there is no such class, or it is no spec."""
        name, module = extra.get("spec_name", DEFAULT_SPEC), extra.get("spec_module_path")
        if not isinstance(name, str) or not name:
            raise ValueError(f"spec_name must be the name of an offloading spec, got {name!r}")
        if module is not None and (not isinstance(module, str) or not module):
            raise ValueError(f"spec_module_path must be the name of a module, got {module!r}")
        target = _SPECS.find(name) if module is None else f"{module}:{name}"
        if target is None:
            known = ", ".join(_SPECS.names())
            raise ValueError(
                f"spec_name={name!r} is unknown (known: {known}), and spec_module_path is not given"
            )
        try:
            found = resolve_object(target)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"spec_name={name!r} of spec_module_path={module!r} cannot be loaded: {error}"
            ) from error
        if not (isinstance(found, type) and issubclass(found, OffloadingSpec)):
            raise ValueError(f"spec_name={name!r} of spec_module_path={module!r} is no OffloadingSpec")
        return found

    @classmethod
    def create_spec(cls, config: OffloadingConfig) -> OffloadingSpec:
        """The spec that the engine's settings name."""
        return cls.get_spec_cls(config.extra_config)(config)
