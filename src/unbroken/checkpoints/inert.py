"""Reading what torch saved without running anything of it: of what a file names, only what makes tensors is called.

``torch.load(weights_only=True)`` refuses a file with an object that it does not know. Here such objects are read as
``Unknown``: they stand where they stood and do nothing, so that what lies beside them can be looked at.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import io
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata

from unbroken.errors import InvalidState

__all__ = ["Unknown", "read_dcp_metadata", "read_plain_pickle", "read_torch_bytes", "read_torch_file"]

Find: TypeAlias = Callable[[str, str], Any]
"""What a pickle gets for the module and the name of a type or function."""

_SAVE_ALONE = "Save the loader's state alone, with torch.save(loader.state_dict(), ...) or as JSON, and name that file."
# What plain values, tensors and arrays are written with; none of it runs code of the user's.
_PLAIN = {"builtins": ("bytearray", "complex", "frozenset", "set"), "collections": ("OrderedDict",)}
_OF_ARRAYS = dict.fromkeys(("numpy._core.multiarray", "numpy.core.multiarray"), ("_reconstruct", "scalar"))
_OF_ARRAYS |= {"numpy": ("dtype", "ndarray")}
_OF_TENSORS = {
    "torch._utils": ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "device"),
}
_OF_DCP = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}  # fmt: skip


class Unknown:
    """An object of a type that is not read. It takes whatever it is made with, and does nothing."""

    __slots__ = ()
    kind = ""

    def __new__(cls, *_: Any, **__: Any) -> Unknown:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> Unknown:
        return self

    def append(self, _: Any) -> None: ...

    def extend(self, _: Any) -> None: ...

    def add(self, _: Any) -> None: ...


def read_torch_file(path: Path) -> tuple[Any, tuple[str, ...]]:
    """What is in a file of ``torch.save``, on the CPU, and the types that were read as ``Unknown``.

    Tensors stay in the file until they are looked at, where torch can do so. Raises ``InvalidState``.
    """
    mapped = zipfile.is_zipfile(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped), ()
    except pickle.UnpicklingError as error:
        if mapped:
            return _read_inert(path, str(path), mmap=True)
        raise InvalidState(
            f"{path} cannot be read without running code of it: {_first_line(error)}\n"
            f"It is a plain pickle, or torch wrote it before version 1.6. {_SAVE_ALONE}"
        ) from None
    except Exception as error:
        raise InvalidState(f"{path} cannot be read as a file of torch.save: {_first_line(error)}") from None


def read_torch_bytes(data: bytes, what: str) -> Any:
    """What ``torch.save`` wrote into a part of a file. Raises ``InvalidState``."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return _read_inert(io.BytesIO(data), what, mmap=False)[0]
    except Exception as error:
        raise InvalidState(f"{what} cannot be read: {_first_line(error)}") from None


def _read_inert(file: Any, what: str, *, mmap: bool) -> tuple[Any, tuple[str, ...]]:
    found: dict[str, None] = {}

    def find(module: str, name: str) -> Any:
        known = _known(module, name, _PLAIN, _OF_TENSORS, _OF_ARRAYS)
        if known is None:
            found[f"{module}.{name}"] = None
        return known or _unknown(module, name)

    inert = SimpleNamespace(Unpickler=_unpickler(find), load=_never, __name__="inert")
    try:
        return torch.load(file, map_location="cpu", weights_only=False, pickle_module=inert, mmap=mmap), tuple(found)
    except Exception as error:
        raise InvalidState(
            f"{what} cannot be read: {_first_line(error)} (objects in it: {', '.join(found) or 'none'}).\n{_SAVE_ALONE}"
        ) from None


def read_plain_pickle(data: bytes, what: str) -> Any:
    """A pickle of numbers, text, bytes, lists, tuples, dicts and sets. Raises ``InvalidState`` on anything else."""

    def find(module: str, name: str) -> Any:
        if (known := _known(module, name, _PLAIN)) is None:
            raise pickle.UnpicklingError(f"it holds an object of {module}.{name}")
        return known

    return _unpickled(data, find, what, "Only numbers, text, bytes, lists, tuples, dicts and sets are read.")


def read_dcp_metadata(path: Path) -> Metadata:
    """The file ``.metadata`` of a DCP checkpoint. It is a pickle, of which only DCP's own types are made; others, of
    older versions of torch for one, are ``Unknown``.

    Raises ``InvalidState``.
    """

    def find(module: str, name: str) -> Any:
        return _known(module, name, _PLAIN, _OF_TENSORS, _OF_DCP) or _unknown(module, name)

    way_out = "torch.distributed.checkpoint writes nothing like it there: the file was changed, or is of another use."
    metadata = _unpickled(path.read_bytes(), find, str(path), way_out)
    if not isinstance(metadata, Metadata):
        raise InvalidState(f"{path} holds a {_kind(metadata)}, and not the metadata of a checkpoint.\n{way_out}")
    return metadata


def _known(module: str, name: str, *tables: Mapping[str, Sequence[str]]) -> Any:
    """What a name stands for, where a table has it, or it is a type of numbers of torch; else None."""
    module = module.replace("__builtin__", "builtins")  # as protocol 2 names it
    if module == "_codecs" and name == "encode":  # how protocol 2 writes bytes
        return _encode
    if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
        return dtype
    if any(name in table.get(module, ()) for table in tables):
        return _apart(getattr(importlib.import_module(module), name))
    return None


@functools.cache
def _of_its_own(kind: type) -> type:
    return type(kind.__name__, (kind,), {"__module__": kind.__module__})


def _apart(known: Any) -> Any:
    """The same, so that a file which sets attributes of it changes nothing that others use. Those of C are fixed."""
    if not isinstance(known, type) or issubclass(known, Enum):
        return functools.partial(known)
    return _of_its_own(known) if dataclasses.is_dataclass(known) else known


def _unpickled(data: bytes, find: Find, what: str, way_out: str) -> Any:
    try:
        return _unpickler(find)(io.BytesIO(data)).load()
    except Exception as error:
        raise InvalidState(f"{what} is not read: {_first_line(error)}.\n{way_out}") from None


def _unpickler(find: Find) -> type[pickle.Unpickler]:
    class Unpickler(pickle.Unpickler):
        def find_class(self, module_name: str, global_name: str, /) -> Any:
            return find(module_name, global_name)

    return Unpickler


def _unknown(module: str, name: str) -> type[Unknown]:
    """A type that is told by the name of the one that it stands for."""
    named = {"kind": f"{module}.{name}", "__slots__": (), "__module__": module, "__qualname__": name}
    return type(name, (Unknown,), named)


def _kind(value: Any) -> str:
    return value.kind if isinstance(value, Unknown) else type(value).__name__


def _encode(text: str, _: str) -> bytes:
    return text.encode("latin1")


def _never(*_: Any, **__: Any) -> Any:
    raise pickle.UnpicklingError("not a file of torch 1.6 or later")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].rstrip(". :")[:300]
