"""``state_dict()`` of a running text stream: its time and its size."""

from __future__ import annotations

from itertools import islice
from statistics import median
from time import perf_counter

import unbroken
from benchmarks.corpus import END_OF_TEXT, prepare
from benchmarks.measure import OURS, Line, Settings, at_most, interleaved, pass_over

LANES = 64


def run(settings: Settings) -> list[Line]:
    """A batch is taken before each call, so that 8 of the 64 lanes have moved."""
    corpus, tokenizer = prepare(settings)
    stream = unbroken.read_jsonl(corpus).tokenize(tokenizer, append=END_OF_TEXT).pack(256)
    calls = settings.batches(300)

    def once() -> tuple[float, float]:
        loader = unbroken.StatefulDataLoader(stream, batch_size=8, lanes=LANES)
        times, sizes = [], []
        with pass_over(loader) as batches:
            for _ in islice(batches, 2 * LANES // 8):
                pass  # every lane is open, and has moved on
            for _ in islice(batches, calls):
                began = perf_counter()
                state = loader.state_dict()
                times.append((perf_counter() - began) * 1e6)
                sizes.append(sum(len(name) + len(leaf.encode()) for name, leaf in state.items()) / 1000)
        return median(times), max(sizes)

    results = interleaved({OURS: once}, settings.repeats())[OURS]
    times, sizes = {OURS: [time for time, _ in results]}, {OURS: [size for _, size in results]}
    return [
        Line(f"state_dict() with {LANES} lanes, text stream: time", "µs", times, (at_most(times, 80, "µs"),)),
        Line(f"state_dict() with {LANES} lanes, text stream: size", "kB", sizes, (at_most(sizes, 64, "kB"),)),
    ]
