"""Loaders whose positions the tests look into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from unbroken import StatefulDataLoader, mix, read_jsonl

__all__ = ["Squares", "Table", "lanes_loader", "mixed_loader", "position_after", "text_files"]


class Squares(IterableDataset[int]):
    """60 rows, dealt to the lanes, with a state; ``failing``: rows that raise."""

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.failing = failing
        self.done = 0

    def __iter__(self) -> Squares:
        info = get_worker_info()
        self.rows = range(60) if info is None else range(info.id, 60, info.num_workers)
        return self

    def __next__(self) -> int:
        if self.done == len(self.rows):
            raise StopIteration
        self.done += 1
        row = self.rows[self.done - 1]
        if row in self.failing:
            raise ValueError(f"row {row} is bad")
        return row * row

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Table(Dataset[int]):
    def __init__(self, length: int = 60) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def lanes_loader(**options: Any) -> StatefulDataLoader[Any]:
    """Six lanes of an iterable dataset."""
    return StatefulDataLoader(Squares(), **{"batch_size": 3, "lanes": 6, "seed": 1, **options})


def text_files(folder: Path) -> Path:
    """Two JSONL files in a folder; a line of ``web`` is bad."""
    for name, count in (("web", 300), ("code", 60)):
        lines = [json.dumps({"text": f"{name} {number}"}) for number in range(count)]
        if name == "web":
            lines[7] = "no JSON"
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def mixed_loader(folder: Path, weights: Any = None, **options: Any) -> StatefulDataLoader[Any]:
    """A mix by tokens of the two files, packed."""
    sources = {
        "web": read_jsonl(folder / "web.jsonl", on_error="skip").shuffle(window=10).tokenize(_ids),
        "code": read_jsonl(folder / "code.jsonl").tokenize(_ids).repeat(),
    }
    stream = mix(sources, weights or {"web": 0.7, "code": 0.3}, by="tokens").pack(16)
    return StatefulDataLoader(stream, **{"batch_size": 4, "lanes": 4, "seed": 1, **options})


def _ids(text: str) -> list[int]:
    return list(text.encode())


def position_after(loader: StatefulDataLoader[Any], steps: int) -> dict[str, str]:
    """The position after so many batches from now."""
    batches = iter(loader)
    for _ in range(steps):
        next(batches)
    return loader.state_dict()
