"""Read-only list view and tensor bytes, shared by requests and codecs.

Owns nothing.  Must not know requests, schedulers or torch (a tensor is used only through its own methods).
Layer: L2 (values).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class ConstantList(Sequence[T], Generic[T]):
    """A live view of a list which refuses every change.

    The view follows the list: what the owner appends is seen at once.  Every mutating list method raises
    ``TypeError``, so that a caller who was handed a view learns about the mistake where it happens.
    """

    __slots__ = ("_x",)

    def __init__(self, x: list[T]) -> None:
        self._x = x

    def append(self, item: T) -> None:
        raise TypeError("cannot append to a constant list")

    def extend(self, item: object) -> None:
        raise TypeError("cannot extend a constant list")

    def insert(self, item: T) -> None:
        raise TypeError("cannot insert into a constant list")

    def pop(self, item: T) -> None:
        raise TypeError("cannot pop from a constant list")

    def remove(self, item: T) -> None:
        raise TypeError("cannot remove from a constant list")

    def clear(self) -> None:
        raise TypeError("cannot clear a constant list")

    def index(self, value: T, start: int = 0, stop: int | None = None) -> int:
        return self._x.index(value, start, len(self._x) if stop is None else stop)

    @overload
    def __getitem__(self, item: int) -> T: ...

    @overload
    def __getitem__(self, item: slice) -> list[T]: ...

    def __getitem__(self, item: int | slice) -> T | list[T]:
        return self._x[item]

    def __setitem__(self, item: int | slice, value: object) -> None:
        raise TypeError("cannot set an item of a constant list")

    def __delitem__(self, item: int | slice) -> None:
        raise TypeError("cannot delete an item of a constant list")

    def __iter__(self) -> Iterator[T]:
        return iter(self._x)

    def __contains__(self, item: object) -> bool:
        return item in self._x

    def __len__(self) -> int:
        return len(self._x)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ConstantList):
            return self._x == other._x
        return self._x == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ConstantList({self._x})"

    def copy(self) -> list[T]:
        """A new, mutable list with the same elements."""
        return self._x.copy()


def tensor_data(tensor: Any) -> memoryview:
    """The bytes of a CPU tensor as a flat memoryview, without a copy where the tensor is contiguous.

    ``tensor`` is a ``torch.Tensor``; the type is opaque here because this layer never imports torch.
    """
    byte_dtype = tensor.new_empty(0).byte().dtype
    flat = tensor.flatten().contiguous()
    data: memoryview = flat.view(byte_dtype).numpy().data
    return data
