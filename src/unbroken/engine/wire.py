"""Batches as a few bytes of pickle and the data beside it, and collation straight into a slot.

Tensors and arrays are taken out of the pickle and written to shared memory at the offsets that the pickle names; the
consumer makes views of that memory. What is neither stays in the pickle. Rows of a stream have a layout that both ends
know, so that several workers can write into one slot.
"""

from __future__ import annotations

import copyreg
import io
import math
import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
import torch.utils.data._utils.collate as torch_collate
from torch.utils.data import default_collate

from unbroken.engine.ring import Bytes
from unbroken.errors import UnsendableBatch

__all__ = ["Encoded", "Places", "RowLayout", "collate", "decode", "encode", "stack_rows", "stacked"]

_ALIGN = 64
_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_DTYPE_NUMBER = {d: n for n, d in enumerate(_DTYPES)}
_IN_BOTH = "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64 complex128"
_FROM_NUMPY = {np.dtype(name): getattr(torch, name) for name in _IN_BOTH.split()}
_TORCHS = {
    torch.Tensor: torch_collate.collate_tensor_fn,
    np.ndarray: torch_collate.collate_numpy_array_fn,
    (np.bool_, np.number, np.object_): torch_collate.collate_numpy_scalar_fn,
    float: torch_collate.collate_float_fn,
    int: torch_collate.collate_int_fn,
    str: torch_collate.collate_str_fn,
    bytes: torch_collate.collate_str_fn,
}
_TO_NUMPY = {theirs: ours for ours, theirs in _FROM_NUMPY.items()}
_lease = threading.local()


@final
@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch ready to be written: its pickle, and the parts with their offsets. ``nbytes`` is the room they need."""

    data: bytes
    parts: list[tuple[int, Any]]
    nbytes: int

    def write(self, memory: Bytes) -> None:
        """Copy (or stack) every part to its place. Raises RuntimeError or ValueError where samples do not stack."""
        for offset, part in self.parts:
            if isinstance(part, _Stack):
                part.write(memory, offset)
            elif isinstance(part, torch.Tensor):
                _place(memory, offset, part.dtype, part.shape).copy_(part)
            else:
                memory[offset : offset + part.nbytes] = part.reshape(-1, order="A").view(np.uint8)


def encode(batch: Any) -> Encoded:
    """Take a batch apart. Raises ``UnsendableBatch``, which names the part that cannot be pickled, or RuntimeError in
    torch's words for a tensor that cannot leave its process."""
    try:
        return _encode(batch)
    except RecursionError as error:
        raise UnsendableBatch(f"A batch is nested too deeply to be sent from a worker process: {error}.") from error
    except (RuntimeError, MemoryError):
        raise
    except Exception as error:
        raise UnsendableBatch(
            f"A batch holds something that cannot be sent from a worker process{_place_of_fault(batch)}: "
            f"{type(error).__name__}: {error}.\n"
            "Return tensors, arrays and plain objects, or build such objects in the training loop from what can be "
            "sent, or use num_workers=0."
        ) from error


def _place_of_fault(batch: Any) -> str:
    """Which part of a batch cannot be sent, for a message: ``, at ['meta'][0]``, or nothing if it is the whole."""
    path = ""
    while len(path) < 200:
        inner = batch.items() if type(batch) is dict else enumerate(batch) if isinstance(batch, list | tuple) else ()
        for name, part in inner:
            try:
                _encode(part)
            except Exception:
                path, batch = f"{path}[{name!r}]", part
                break
        else:
            break
    return f", at {path}" if path else ""


def _encode(batch: Any) -> Encoded:
    parts = _Parts()
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 5)
    table: dict[type, Any] = dict(copyreg.dispatch_table)
    table[torch.Tensor] = parts.tensor
    table[np.ndarray] = table[np.memmap] = parts.array
    table[_Stack] = parts.stack
    pickler.dispatch_table = table
    pickler.dump(batch)
    return Encoded(buffer.getvalue(), parts.parts, parts.nbytes)


def decode(data: bytes, lease: Bytes | None) -> Any:
    """The batch again; its tensors and arrays are views of the lease and keep it alive."""
    _lease.memory = lease
    try:
        return pickle.loads(data)
    finally:
        _lease.memory = None


@final
class _Parts:
    """The reducers of one batch: each tensor or array becomes its place in the slot."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, Any]] = []
        self.nbytes = 0

    def _place(self, part: Any, nbytes: int) -> int:
        offset = -(-self.nbytes // _ALIGN) * _ALIGN
        self.parts.append((offset, part))
        self.nbytes = offset + nbytes
        return offset

    def stack(self, part: _Stack) -> Any:
        shape = (len(part.samples), *part.samples[0].shape)
        nbytes = part.samples[0].nbytes * len(part.samples)
        offset = self._place(part, nbytes) if nbytes else -1
        return _tensor_at, (offset, _DTYPE_NUMBER[part.dtype], shape, None, False)

    def tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
            return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        if tensor.requires_grad and not tensor.is_leaf:
            raise RuntimeError(
                "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support "
                "crossing process boundaries.  If you just want to transfer the data, call detach() on the tensor "
                "before serializing (e.g., putting it on the queue)."
            )
        plain = tensor.detach().resolve_conj().resolve_neg()
        order, strides = _dense_order(plain), None
        if order is not None:
            strides = plain.stride()
            plain = plain.permute(order)
        plain = plain.contiguous()
        offset = self._place(plain, plain.nbytes) if plain.nbytes else -1
        arguments = (offset, _DTYPE_NUMBER[tensor.dtype], tuple(tensor.shape), strides, tensor.requires_grad)
        return _tensor_at, arguments

    def array(self, array: np.ndarray[Any, Any]) -> Any:
        if array.dtype.hasobject:
            return array.__reduce_ex__(5)
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        plain: np.ndarray[Any, Any] = np.asarray(array, order=order)  # type: ignore[call-overload]
        offset = self._place(plain, plain.nbytes) if plain.nbytes else -1
        dtype = plain.dtype.str if plain.dtype.names is None else plain.dtype
        return _array_at, (offset, dtype, plain.shape, order)


def _dense_order(tensor: torch.Tensor) -> list[int] | None:
    """The order of dimensions in which a dense tensor is contiguous where that is not its own (channels last, say)."""
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else None


def _tensor_view(memory: Bytes, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over memory, which it keeps alive as it is: a memoryview lies between (see ``Slot.lease``)."""
    count = math.prod(shape)
    if (known := _TO_NUMPY.get(dtype)) is not None:  # quicker than what serves every dtype
        return torch.from_numpy(np.frombuffer(memoryview(memory), known, count, offset).reshape(shape))  # type: ignore[arg-type]
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def _place(memory: Bytes, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The same for a moment, to write to: quicker, and it holds nothing."""
    if (known := _TO_NUMPY.get(dtype)) is not None:
        return torch.from_numpy(np.ndarray(shape, known, memory, offset))
    return _tensor_view(memory, offset, dtype, shape)


def _tensor_at(
    offset: int, dtype: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, requires_grad: bool
) -> torch.Tensor:
    if offset < 0:
        tensor = torch.empty(shape, dtype=_DTYPES[dtype], device="cpu")  # whatever the default device is
    else:
        tensor = _tensor_view(_lease.memory, offset, _DTYPES[dtype], shape)
        if strides is not None:
            tensor = tensor.as_strided(shape, strides)
    return tensor.requires_grad_() if requires_grad else tensor


def _array_at(offset: int, dtype: Any, shape: tuple[int, ...], order: Any) -> np.ndarray[Any, Any]:
    if offset < 0:
        return np.empty(shape, dtype)
    return np.frombuffer(memoryview(_lease.memory), dtype, math.prod(shape), offset).reshape(shape, order=order)


@final
@dataclass(frozen=True, slots=True)
class _Stack:
    """Samples that are to be stacked, once it is known where."""

    samples: list[Any]
    dtype: torch.dtype

    def write(self, memory: Bytes, offset: int) -> None:
        first = self.samples[0]
        view = _place(memory, offset, self.dtype, (len(self.samples), *first.shape))
        if isinstance(first, torch.Tensor):
            torch.stack(self.samples, 0, out=view)
        else:
            np.stack(self.samples, out=view.numpy())


def _is_torchs() -> bool:
    """Whether torch's collation is as torch made it: a program may have put functions of its own into its map."""
    return torch_collate.default_collate_fn_map == _TORCHS


def collate(samples: list[Any]) -> Any:
    """As torch's ``default_collate``, with the stacking put off until ``Encoded.write``.

    Only the plain types are handled here, in the way that torch's documentation describes; all else is left to torch.
    Samples that do not stack (shapes that differ, say) show when they are written: ``write`` raises, and the caller
    collates with torch, whose error or result is then the one that counts.
    """
    return _collate(samples) if _is_torchs() else default_collate(samples)


def _collate(samples: list[Any]) -> Any:
    first = samples[0]
    kind = type(first)
    if kind is torch.Tensor:
        dtype = first.dtype
        if _plain(first) and first.nbytes and all(type(s) is torch.Tensor and s.dtype is dtype for s in samples):
            return _Stack(list(samples), dtype)
    elif kind is np.ndarray:
        dtype = _FROM_NUMPY.get(first.dtype)
        if dtype and first.nbytes and all(type(s) is np.ndarray and s.dtype == first.dtype for s in samples):
            return _Stack(list(samples), dtype)
    elif kind is dict:
        return {name: _collate([s[name] for s in samples]) for name in first}
    elif kind in (list, tuple) or (issubclass(kind, tuple) and hasattr(first, "_fields")):
        same = all(len(sample) == len(first) for sample in samples)
        fields = [_collate_field(field) for field in zip(*samples, strict=True)] if same else None
        if fields is not None:
            return kind(*fields) if hasattr(first, "_fields") else fields
    return default_collate(samples)


def stacked(batch: Any) -> Any:
    """What ``collate`` put off, done: the batch in memory of its own."""
    if isinstance(batch, _Stack):
        shape = (len(batch.samples), *batch.samples[0].shape)
        memory = np.empty(batch.samples[0].nbytes * len(batch.samples), np.uint8)
        batch.write(memory, 0)
        return _tensor_view(memory, 0, batch.dtype, shape)
    if type(batch) is dict:
        return {name: stacked(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(stacked, batch))
    return list(map(stacked, batch)) if type(batch) is list else batch


def _collate_field(field: tuple[Any, ...]) -> Any:
    return field if isinstance(field[0], str | bytes) else _collate(list(field))


def _plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
    )


def _as_array(tensor: torch.Tensor) -> Any:
    return tensor.numpy() if tensor.dtype in _TO_NUMPY else tensor


def stack_rows(rows: list[Any]) -> dict[str, torch.Tensor] | None:
    """Rows that are dicts of plain arrays or tensors of equal shapes, stacked in memory of their own; else ``None``."""
    layout = RowLayout.of(rows[0])
    if layout is None:
        return None
    fields = {
        name: torch.empty((len(rows), *shape), dtype=_DTYPES[dtype], device="cpu")
        for name, dtype, shape, _ in layout.fields
    }
    places = Places({name: _as_array(tensor) for name, tensor in fields.items()})
    return fields if all(places.put(place, row) for place, row in enumerate(rows)) else None


@final
class Places:
    """Room for rows of one layout: for each field an array [rows, ...], or a tensor of a dtype that numpy lacks."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = [(name, room, room.dtype, room.shape[1:]) for name, room in fields.items()]

    def put(self, place: int, row: Any) -> bool:
        """Copy a row to its place, if it is of this layout; whether it is."""
        if type(row) is not dict or len(row) != len(self._fields):
            return False
        for name, _, dtype, shape in self._fields:
            value: Any = row.get(name)
            kind = type(value)
            if kind is np.ndarray:
                fits = value.dtype == dtype
            else:
                fits = kind is torch.Tensor and _plain(value) and _TO_NUMPY.get(value.dtype, value.dtype) == dtype
            if not fits or value.shape != shape:
                return False
        for name, room, _, _ in self._fields:
            value = row[name]
            if type(value) is np.ndarray:
                room[place] = value
            else:
                whole = room if type(room) is torch.Tensor else torch.from_numpy(room)
                whole[place].copy_(value)
        return True


@final
class RowLayout(NamedTuple):
    """Where the fields of a row lie in a slot that holds ``rows`` of them: for each name, dtype, shape and bytes."""

    fields: tuple[tuple[str, int, tuple[int, ...], int], ...]

    @staticmethod
    def of(row: Any) -> RowLayout | None:
        """The layout of rows like this one; ``None`` where a row is not a dict of plain arrays or tensors."""
        if type(row) is not dict or not row or not _is_torchs():
            return None
        fields = []
        for name, value in row.items():
            plain = type(value) is np.ndarray or (type(value) is torch.Tensor and _plain(value))
            dtype = value.dtype if type(value) is torch.Tensor else _FROM_NUMPY.get(value.dtype) if plain else None
            if type(name) is not str or not plain or dtype is None or not value.nbytes:
                return None
            fields.append((name, _DTYPE_NUMBER[dtype], tuple(value.shape), int(value.nbytes)))
        return RowLayout(tuple(fields))

    def nbytes(self, rows: int) -> int:
        """The room that ``rows`` of them need."""
        return self._offsets(rows)[-1]

    def places(self, memory: Bytes, rows: int) -> Places:
        """Where ``rows`` of them can be put in memory: to be used while that is held."""
        return Places(
            {
                name: _as_array(_place(memory, offset, _DTYPES[dtype], (rows, *shape)))
                for (name, dtype, shape, _), offset in zip(self.fields, self._offsets(rows), strict=False)
            }
        )

    def batch(self, memory: Bytes, rows: int) -> dict[str, torch.Tensor]:
        """All rows, stacked: views of the memory, which they keep alive."""
        return {
            name: _tensor_view(memory, offset, _DTYPES[dtype], (rows, *shape))
            for (name, dtype, shape, _), offset in zip(self.fields, self._offsets(rows), strict=False)
        }

    def _offsets(self, rows: int) -> list[int]:
        offsets, end = [], 0
        for _, _, _, nbytes in self.fields:
            offsets.append(end)
            end = -(-(end + nbytes * rows) // _ALIGN) * _ALIGN
        return [*offsets, end]
