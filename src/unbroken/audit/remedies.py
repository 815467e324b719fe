"""What to do about each of the likely causes that are found by patterns."""

from __future__ import annotations

from typing import Final

__all__ = ["REMEDIES"]

REMEDIES: Final = {
    "not repeatable": "Give every generator a seed, sort listings of files, and let nothing depend on the clock, on "
    "the process or on the order of a set. No resume can be exact before two fresh runs are equal.",
    "live buffer handed out": "Copy what is changed in place before it leaves state_dict(): list(self.buffer), or "
    "copy.deepcopy(self.state). A state is often read later than it is taken, by another thread or process.",
    "state updated after yield": "Move the position before the yield: self.done += 1, then yield row. While a row is "
    "out, the code after its yield has not been run.",
    "buffer shuffle forgotten": "Save what is in the shuffle buffer and the state of its generator, or better the "
    "place from which it is filled, and fill it again on a resume.",
    "epoch not in the state": "Put the epoch into state_dict(), and draw the order as a function of seed and epoch.",
    "augmentation not seeded": "Draw random numbers from a generator whose seed is a function of the row (its index "
    "and the epoch), or put the generator's state into state_dict().",
    "order not seeded": "Give the sampler or the shuffle a seed, or put the permutation's generator into the state.",
    "load_state_dict after iter, or without effect": "Load before iter() is called, and let __iter__ begin at what "
    "was loaded. A factory must return a loader that has not begun; where workers are used, the state must reach them.",
    "state behind what was delivered": "Let the state say which row was delivered last: where it says the shard or the "
    "document only, put the number of rows delivered of it beside that.",
    "state ahead of what was delivered": "Let the state describe the row that was delivered last, and not what was "
    "read or prefetched: rows that were made and not handed out must be made again.",
    "saving changes what comes": "Let state_dict() only read: it must move no place, draw no random number, and take "
    "nothing out of a buffer.",
}
