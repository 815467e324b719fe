"""One lane of any dataset: open, advance, anchor and count.

This is the only code that advances a lane: workers, inline loading and the remaking after a resume all use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, final

from unbroken.anchor import Anchor
from unbroken.engine.opening import UNTOUCHED, Opening, set_worker_info
from unbroken.engine.pace import Pace
from unbroken.engine.skipping import pass_over
from unbroken.errors import InexactDataset, InvalidState
from unbroken.lane_position import LanePosition
from unbroken.ledger import digest, entry_of
from unbroken.made import Made, Turn
from unbroken.seeding import Globals, key, seed_globals, write_globals
from unbroken.skipped import LeftOut, Skipping

__all__ = ["Cursor", "Report", "Rules"]

Report = Callable[[str, int, int], None]
"""Called now and then while samples are made again: what, samples made, samples to make."""

_END = object()
_NEIGHBOURS = 3


@final
@dataclass(frozen=True)
class Rules:
    """How the lanes of a run are made; the same for all of them.

    ``run`` is the run's key; ``capture_every`` is in turns of a lane, ``None`` adapts; ``word`` keeps the random
    numbers of samplers and datasets apart; ``pristine`` is the dataset's own state before it was ever opened;
    ``endless``: a lane goes on with its own next epoch; ``lineage``: a stream tells the origins of its rows;
    ``skipping``: samples that fail are left out; ``once``: samples cannot be made again.
    """

    run: int
    seed_by: str = "batch"
    resume: str = "checked"
    capture_every: int | None = None
    drop_last: bool = False
    word: str = "lane"
    pristine: str | None = None
    endless: bool = False
    lineage: bool = False
    skipping: Skipping | None = None
    once: bool = False


@final
class Cursor:
    """One lane: an iterator over a dataset, opened where a position says, that makes a turn at a time."""

    def __init__(
        self,
        opening: Opening,
        lane: int,
        start: LanePosition,
        rules: Rules,
        *,
        report: Report,
        info: Any = None,
        opening_globals: Globals | None = None,
    ) -> None:
        self._opening = opening
        self._lane = lane
        self._start = start
        self._rules = rules
        self._info = info
        self._opening_globals = opening_globals
        self._report = report
        self._iterator: Iterator[Any] | None = None
        self._next = start.delivered
        self._opened_now = False
        self._stop: BaseException | Made | None = StopIteration() if start.ended else None
        self._pace = Pace(rules.capture_every if not opening.exact else 1, start.turns)

    @property
    def _believed(self) -> bool:
        """Whether a state is taken at its word: a stream's, which is exact by construction, or a trusted one."""
        return self._opening.exact or self._rules.resume == "trust"

    @property
    def _exhausted(self) -> bool:
        return isinstance(self._stop, StopIteration)

    @property
    def place(self) -> int:
        """The number of the sample that comes next in this epoch."""
        return self._next

    def make(self, size: int) -> Made:
        """The next turn: up to ``size`` samples, or the end of the lane.

        Raises what the dataset raises; ``InexactDataset`` where a resume does not lead back to the place.
        """
        if self._exhausted:
            return Made(ended=True, carry=self._start.carry)
        aside = set_worker_info(self._info)
        try:
            made = self._go_on()
            if self._iterator is None:
                self._open(made)
            self._produce(made, size)
            if made.opened is not None:
                made.unaware = self._info is not None and not self._info.looked_at
            return made
        finally:
            set_worker_info(aside)

    def _go_on(self) -> Made:
        """The turn that was begun, or a new one; or raise what was put off. A generator is over after an error, so it
        is opened again where it stands.
        """
        stop, self._stop = self._stop, None
        if isinstance(stop, BaseException):
            raise stop
        if self._rules.once and getattr(self._iterator, "gi_frame", self) is None:
            self._enter(None)
            self._opened_now = False
        return stop or Made()

    def row(self) -> tuple[Any, Turn] | Made:
        """The next row of a stream and what to count of it; where there is more to tell than that, a turn of one."""
        if self._iterator is None or self._exhausted or not self._opening.exact:
            return self.make(1)
        aside = set_worker_info(self._info)
        try:
            row = next(self._iterator, _END)
            if row is not _END:
                self._next += 1
                origins = self._opening.origin() if self._rules.lineage else None
                return row, Turn(self._next, digest(row), self._opening.capture(), origins)
        finally:
            set_worker_info(aside)
        return self.make(1)

    def _produce(self, made: Made, size: int) -> None:
        began, rules = perf_counter(), self._rules
        plan = self._pace.plan(size) if self._opening.stateful else "none"
        if rules.once and plan != "none":
            plan = "each"  # a turn may end anywhere, and the state of a lane at its end may be that of a beginning
        seeded = not self._opening.exact  # a stream seeds for itself
        if seeded and not self._opened_now:
            seed_globals(self._batch_key(self._next))
        for number in range(len(made.samples), size):
            if seeded and rules.seed_by == "sample" and not self._opened_now:
                seed_globals(self._sample_key(self._next))
            around = plan == "each" or (plan == "last" and number >= size - 2)
            if around and not self._believed and not self._pace.has(self._next):
                self._capture(made)
            try:
                if not self._advance(made):
                    break
            except Exception as error:
                if not (rules.once and made.samples):
                    self._keep(made)
                    raise
                self._stop = error  # what was made is delivered, as a shorter turn
                break
            except BaseException:  # Ctrl-C, say, is not put off
                self._keep(made)
                raise
            if around:
                self._capture(made)
        self._digest(made)
        if self._exhausted and (not made.samples or (rules.drop_last and len(made.samples) < size)):
            made.samples, made.digests, made.entry, made.number, made.capture = [], [], None, 0, None
            made.ended, made.carry = True, self._start.carry
        self._pace.note(perf_counter() - began, found=made.capture is not None)

    def _keep(self, made: Made) -> None:
        """The next turn goes on with this one. Where samples can be made again, the lane is opened again instead."""
        self._stop = made if self._rules.once else None

    def _advance(self, made: Made) -> bool:
        """Make one sample; False at the end of the lane."""
        try:
            sample = next(self._iterator, _END)  # type: ignore[arg-type]
        except Exception as error:
            if self._rules.skipping is None:
                raise
            sample, out = pass_over(self._iterator, error, self._rules.skipping, self._leave_out, _END)  # type: ignore[arg-type]
            made.left_out = [*made.left_out, *out]
        if sample is _END:
            if self._opened_now and self._start.carry is not None and self._start.carry != self._rules.pristine:
                # The state carried over from the last epoch stands at its end: begin as the dataset did at first.
                self._start.carry = self._rules.pristine
                self._enter(self._rules.pristine)
                made.opened = (0, self._opening.capture())
                return self._advance(made)
            self._stop = StopIteration()
            self._start.carry = self._opening.carry()
            return False
        self._opened_now = False
        made.samples.append(sample)
        if self._rules.lineage:
            made.origins = self._opening.origin()
        self._next += 1
        return True

    def _leave_out(self, error: Exception) -> LeftOut:
        """A sample failed. It has a number too, so that those after it have the same with and without it."""
        epoch, number = self._start.epoch, self._next
        self._next, self._opened_now = number + 1, False
        if self._rules.seed_by == "sample":
            self._seed(self._sample_key(self._next))
        return LeftOut.of(epoch, number, f"lane {self._lane}, sample {number} of epoch {epoch}", error)

    def _digest(self, made: Made) -> None:
        """Digest the last sample; for some turns after a capture its neighbours too, which fix the anchor's place."""
        made.number = len(made.samples)
        tail = _NEIGHBOURS if self._pace.fixing else 1
        if made.left_out:  # neighbours have nothing between them
            tail = min(tail, max(1, self._next - 1 - made.left_out[-1].number))
        made.digests = [digest(sample) for sample in made.samples[-tail:]]
        if made.number > 1:
            made.entry = entry_of(made.samples, made.digests[-1])

    def _capture(self, made: Made) -> None:
        began = perf_counter()
        state = self._opening.capture()
        self._pace.spent(perf_counter() - began)
        if self._believed:
            made.capture = (self._next, None, state)
        elif (capture := self._pace.weigh(self._next, state)) is not None:
            made.capture = capture

    # ---- opening, and making again what was delivered since the anchor

    def _enter(self, state: str | None) -> None:
        if self._opening_globals is not None:
            write_globals(self._opening_globals)
        else:
            self._seed(key(self._rules.run, "open", self._rules.word, self._start.epoch, self._lane))
        self._iterator = self._opening.enter(state)
        self._opened_now = True

    def _open(self, made: Made) -> None:
        start = self._start
        if start.anchor is None:
            if start.delivered:
                raise InvalidState(
                    f"The position of lane {self._lane} counts samples but has no anchor: it was changed."
                )
            self._enter(self._rules.pristine if self._rules.resume == "replay" else start.carry)
            made.opened = (0, self._opening.capture())
            return
        if self._rules.resume == "replay" and start.last is None and start.anchor.after is not None:
            raise InvalidState(
                f"The position of lane {self._lane} was taken over from another loader: it begins at a state of the "
                'dataset, and not at the start of the epoch, and resume="replay" ignores states.\n'
                'Use resume="checked" or "trust" for the rest of this epoch, or take it over for a loader like this.'
            )
        failures: list[Exception | None] = []
        if self._find_place(start.anchor, failures):
            return
        failure = next(filter(None, failures), None)
        if failure is not None and None not in failures:
            raise failure
        raise InexactDataset(self._inexact_text(start)) from failure

    def _find_place(self, anchor: Anchor, failures: list[Exception | None]) -> bool:
        """Open where the anchor leads, and see by the digests of what is made again that it is the place.

        ``failures`` gets what each try that failed raised; None where its samples were other ones. Errors of the
        surroundings say nothing of a state, and are raised: what is tried next might fit by chance.
        """

        def leads_to(state: str | None, first: int) -> bool:
            failure: Exception | None = None
            for _ in range(2):  # a state that does not fit may make any dataset raise anything, again and again
                try:
                    if self._reach(state, first):
                        return True
                    failure = None
                    break
                except Exception as error:
                    self._iterator = None
                    if _may_pass(error):
                        raise
                    failure = error
            failures.append(failure)
            return False

        if self._rules.resume == "replay":
            return leads_to(self._rules.pristine, 0)
        if self._rules.once:
            return leads_to(anchor.after, self._start.delivered)
        if anchor.at == 0 or self._believed:
            return leads_to(anchor.after, anchor.at)
        if not anchor.fixed:  # of a position that was saved with resume="trust"
            return False
        at = anchor.at
        if anchor.before is None:  # the place after the sample, or before it where the state is updated late
            return leads_to(anchor.after, at) or leads_to(anchor.after, at - 1)
        ahead = leads_to(anchor.before, at - 1)
        entered = any(leads_to(anchor.after, first) for first in (at, at - 1, at + 1))
        if ahead and not entered:
            return leads_to(anchor.before, at - 1)
        return entered and not ahead  # content that repeats may let both match: then neither can be believed

    def _reach(self, state: str | None, first: int) -> bool:
        """Open at a state and make again what was delivered from sample ``first`` on; whether the digests agree."""
        start, rules = self._start, self._rules
        if first > start.delivered:
            return False
        self._enter(state)
        told = perf_counter()
        expected, left_out = self._expected(), start.left_out()
        for sample in range(first, start.delivered):
            if sample != first:
                if start.starts_batch(sample):
                    self._seed(self._batch_key(sample))
                if rules.seed_by == "sample":
                    self._seed(self._sample_key(sample))
            elif first and rules.resume == "trust":
                self._seed(self._batch_key(sample))
            try:
                again = next(self._iterator)  # type: ignore[arg-type]
            except StopIteration:
                return False
            except Exception:
                if sample not in left_out:
                    raise
                continue  # one that does not fail any more is left out all the same
            if sample in expected and digest(again) != expected[sample]:
                return False
            if (now := perf_counter()) - told > 0.2:
                told = now
                self._report(f"lane {self._lane}", sample - first, start.delivered - first)
        self._next = start.delivered
        self._opened_now = start.delivered == 0
        return True

    def _seed(self, place: int) -> None:
        if self._info is not UNTOUCHED:
            seed_globals(place)

    def _expected(self) -> dict[int, int]:
        start = self._start
        if self._rules.resume == "trust" or start.anchor is None:
            return {}
        expected = {start.anchor.first_witness + i: d for i, d in enumerate(start.anchor.witnesses)}
        if start.last is not None:
            expected[start.last_place] = start.last
        return expected

    def _batch_key(self, first: int) -> int:
        return key(self._rules.run, "batch", self._rules.word, self._start.epoch, self._lane, first)

    def _sample_key(self, sample: int) -> int:
        return key(self._rules.run, "sample", self._rules.word, self._start.epoch, self._lane, sample)

    def _inexact_text(self, start: LanePosition) -> str:
        at = start.anchor.at if start.anchor else 0
        if start.anchor is not None and not start.anchor.fixed:
            return (
                f'This position of {self._opening.name} was saved with resume="trust", and holds nothing by which the '
                f"place of lane {self._lane} could be checked.\n"
                'Load it with resume="trust", or with resume="replay" to make everything again from the start of the '
                "epoch."
            )
        return (
            f"{self._opening.name} did not make again what it had delivered.\n"
            f"Lane {self._lane}, epoch {start.epoch}: opened at the state saved around sample {at}, it should have "
            f"come to sample {start.delivered} with the content it had, and did not.\n"
            "Either its state_dict() does not lead back to the place (something it needs is not in it), or its "
            "samples differ when they are made again (a random generator of its own without a seed, another file, "
            "the clock).\n"
            'resume="replay" ignores its state and makes everything again from the start of the epoch; resume="trust" '
            "takes the state at its word and checks nothing."
        )


def _may_pass(error: Exception) -> bool:
    """Whether an error is one of the machine or the network, and no answer to a state that leads nowhere."""
    nowhere = FileNotFoundError | NotADirectoryError | IsADirectoryError
    return isinstance(error, OSError | MemoryError) and not isinstance(error, nowhere)
