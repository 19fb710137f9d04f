"""A model's `config.json` as a plain record: attributes and items, nested. Knows no model. Layer: L1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

TEXT_RECORDS: Final = ("text_config", "language_config", "llm_config")
"""Where a composite config keeps the record of its language model."""


class ConfigRecord(Mapping[str, Any]):
    """The values of a JSON object, readable as attributes (`record.hidden_size`) and as items (`record["x"]`).

    Nested objects are records too. Attributes may be assigned; a missing one raises AttributeError, `get` gives a
    default.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, **more: Any) -> None:
        for key, value in {**(values or {}), **more}.items():
            setattr(self, key, _as_record(value))

    if TYPE_CHECKING:
        # The values are whatever the file holds.
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __getitem__(self, key: str) -> Any:
        return self.__dict__[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__)

    def __len__(self) -> int:
        return len(self.__dict__)

    def __repr__(self) -> str:
        return f"ConfigRecord({self.to_dict()!r})"

    def first(self, *names: str) -> Any:
        """The value of the first of `names` that is present and not None, else None."""
        for name in names:
            value = self.__dict__.get(name)
            if value is not None:
                return value
        return None

    def to_dict(self) -> dict[str, Any]:
        """A plain nested dict of the values."""
        return {key: _as_plain(value) for key, value in self.__dict__.items()}

    def update(self, values: Mapping[str, Any]) -> None:
        """Assign every value; nested objects are merged, not replaced."""
        for key, value in values.items():
            present = self.__dict__.get(key)
            if isinstance(present, ConfigRecord) and isinstance(value, Mapping):
                present.update(value)
            else:
                setattr(self, key, _as_record(value))

    def get_text_config(self) -> ConfigRecord:
        """The nested record of the language model in a composite config, else this record itself."""
        for name in TEXT_RECORDS:
            nested = self.__dict__.get(name)
            if isinstance(nested, ConfigRecord):
                return nested
        return self


def _as_record(value: Any) -> Any:
    if isinstance(value, ConfigRecord):
        return value
    if isinstance(value, Mapping):
        return ConfigRecord(value)
    if isinstance(value, list):
        return [_as_record(item) for item in value]
    return value


def _as_plain(value: Any) -> Any:
    if isinstance(value, ConfigRecord):
        return value.to_dict()
    if isinstance(value, list):
        return [_as_plain(item) for item in value]
    return value
