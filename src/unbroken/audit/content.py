"""What a value consists of, fed to a hash: structure, types and content, and nothing of how it lies in memory.

Pickled bytes would not do: they hold whole storages behind views, the order of sets, and which parts are one object.
"""

from __future__ import annotations

import copyreg
import enum
from collections.abc import Callable, Mapping, Set
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from unbroken.errors import AuditError

__all__ = ["attributes_of", "feed"]

Update: TypeAlias = Callable[[bytes], None]

_FLAT: Final = (str, bytes, bytearray, int, float, complex, type(None))
_NAMED: Final = (type, FunctionType, BuiltinFunctionType, ModuleType)
_HEAP: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE, of classes made by a class statement


def feed(update: Update, value: Any, inside: frozenset[int] = frozenset()) -> None:
    """Feed a value to a hash. ``inside`` holds the ids of what it lies in.

    Raises ``AuditError`` for what contains itself, and for what has no content that can be read.
    """
    kind = type(value)
    update(f"{kind.__module__}.{kind.__qualname__}:".encode("utf-8", "backslashreplace"))
    if isinstance(value, enum.Enum):
        update(f"{value._name_}:".encode())
        value = value._value_
    if isinstance(value, _NAMED):
        update(f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}".encode())
    elif isinstance(value, _FLAT):
        _feed_flat(update, value)
        if kind not in _FLAT:
            _feed_own(update, value, inside)
    elif id(value) in inside:
        raise _cannot(value, "it contains itself")
    else:
        _feed_parts(update, value, inside | {id(value)})


def _feed_parts(update: Update, value: Any, inside: frozenset[int]) -> None:
    if isinstance(value, torch.Tensor):
        _feed_tensor(update, value, inside)
        _feed_own(update, value, inside)
    elif isinstance(value, np.ndarray | np.generic):
        _feed_array(update, value, inside)
    elif isinstance(value, Mapping | list | tuple):
        update(f"{len(value)}:".encode())
        for item in value.items() if isinstance(value, Mapping) else value:
            feed(update, item, inside)
        if isinstance(value, dict | list | tuple):
            _feed_own(update, value, inside)
    elif isinstance(value, Set):
        for text in sorted(_bytes(item, inside) for item in value):
            update(text)
    elif type(value).__module__.partition(".")[0] in ("pyarrow", "pandas"):
        _feed_table(update, value, inside)
    else:
        _feed_object(update, value, inside)


def _feed_own(update: Update, value: Any, inside: frozenset[int]) -> None:
    """What an object of a class of its own has besides what the known class has."""
    own = attributes_of(value)
    if own:
        feed(update, own, inside)


def _bytes(value: Any, inside: frozenset[int]) -> bytes:
    found: list[bytes] = []
    feed(found.append, value, inside)
    return b"".join(found)


def _feed_flat(update: Update, value: Any) -> None:
    # A subclass may have a __repr__ that says less, and long integers have no decimal text.
    if isinstance(value, int):
        text = int.__format__(value, "x")
    else:
        base: Any = next(base for base in _FLAT if isinstance(value, base))
        text = base.__repr__(value)
    update(f"{len(text)}:{text}".encode("utf-8", "backslashreplace"))


def _feed_tensor(update: Update, value: torch.Tensor, inside: frozenset[int]) -> None:
    value = value.detach()
    if value.is_quantized or value.is_meta:
        raise _cannot(value, f"it is {'quantized' if value.is_quantized else 'on the device meta, and has no content'}")
    update(f"{value.dtype}{value.layout}".encode())
    if value.is_nested:
        feed(update, value.unbind(), inside)
        return
    update(f"{tuple(value.shape)}".encode())
    if value.layout != torch.strided:
        whole = value.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
        feed(update, (whole.indices(), whole.values()), inside)
        return
    flat = value.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # one value out of others
        flat = flat.clone(memory_format=torch.contiguous_format)
    update(flat.view(torch.uint8).numpy().tobytes())


def _feed_array(update: Update, value: np.ndarray[Any, Any] | np.generic, inside: frozenset[int]) -> None:
    update(f"{value.dtype}{value.shape}".encode("utf-8", "backslashreplace"))
    if value is np.ma.masked:  # a value of a masked array that is masked
        return
    if isinstance(value, np.ma.MaskedArray):
        feed(update, (np.ma.getmaskarray(value), np.asarray(value.filled())), inside)
    elif value.dtype.names:  # field by field: there may be gaps between them, with anything in them
        for name in value.dtype.names:
            feed(update, np.asarray(value[name]), inside)  # type: ignore[index]
    elif value.dtype.hasobject:
        feed(update, value.tolist(), inside)
    else:
        update(value.tobytes())


def _feed_table(update: Update, value: Any, inside: frozenset[int]) -> None:
    """Of pyarrow or pandas, told by their methods: they are not imported."""
    if hasattr(value, "to_pylist"):
        schema = getattr(value, "schema", None)
        kinds = value.type if schema is None else list(zip(schema.names, map(str, schema.types), strict=True))
        feed(update, (str(kinds), value.to_pylist()), inside)
    elif hasattr(value, "as_py"):
        feed(update, (str(value.type), value.as_py()), inside)
    elif hasattr(value, "columns") and hasattr(value, "items"):
        feed(update, (list(value.columns), value.index, [column for _, column in value.items()]), inside)
    elif hasattr(value, "to_numpy"):
        index = getattr(value, "index", None)
        feed(update, (str(value.dtype), value.to_numpy(), index, getattr(value, "name", None)), inside)
    else:
        _feed_object(update, value, inside)


def _feed_object(update: Update, value: Any, inside: frozenset[int]) -> None:
    """What its class says that it consists of: its state, or what it is made again from; else its attributes."""
    kind: Any = type(value)
    base: Any = object
    if getattr(kind, "__getstate__", None) is not getattr(base, "__getstate__", None):
        feed(update, value.__getstate__(), inside)
        return
    attributes = attributes_of(value)
    plain = kind.__reduce_ex__ is base.__reduce_ex__ and kind.__reduce__ is base.__reduce__
    if plain and (attributes or kind.__flags__ & _HEAP) and kind not in copyreg.dispatch_table:
        feed(update, attributes, inside)
        return
    try:
        reduced: Any = copyreg.dispatch_table.get(kind)
        made = value.__reduce_ex__(2) if reduced is None else reduced(value)
        # What follows the first three may be iterators over items.
        parts: Any = made if isinstance(made, str) else [*made[:3], *(list(each or ()) for each in made[3:5])]
    except Exception as error:
        if not attributes:
            raise _cannot(value, f"it has no content that can be read ({error})") from error
        parts = attributes
    feed(update, parts, inside)


def attributes_of(value: Any) -> dict[str, Any]:
    """Those of an object itself by name, in the order of names: of its ``__dict__``, and its slots."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            own = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, own):
                found[own] = getattr(value, own)
    return dict(sorted(found.items(), key=lambda item: str(item[0])))


def _cannot(value: Any, why: str) -> AuditError:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return AuditError(
        f"The audit cannot compare a {name} of a batch: {why}.\n"
        "Let the factory return a loader whose batches are of tensors, arrays, plain values, and objects of these."
    )
