"""Reading again what could not be read: which failures may pass, how long to wait, and what is told in the end."""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

__all__ = ["may_pass", "of_reading", "patiently", "status_of"]

Result = TypeVar("Result")

_log = logging.getLogger("unbroken")
_pauses = random.SystemRandom()  # whose draws move no generator of the user's

_FOR_GOOD = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError, FileExistsError)
_ERRNOS_FOR_GOOD = {errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSYS}
_PASSING = (TimeoutError, ConnectionError)
_PASSING_STATUS = {408, 425, 429}
# The libraries under fsspec's file systems raise errors of their own, not all of which are OSErrors.
_NETWORK = {
    "aiohttp",
    "asyncio",
    "azure",
    "botocore",
    "fsspec",
    "gcsfs",
    "google",
    "h11",
    "http",
    "httpcore",
    "httpcore2",
    "httpx",
    "httpx2",
    "huggingface_hub",
    "requests",
    "urllib3",
}
# What is wrong on this side: how the library was set up.
_SETUP = {"NoCredentialsError", "NoRegionError", "ParamValidationError", "PartialCredentialsError", "ProfileNotFound"}


def patiently(read: Callable[[], Result], retries: int, what: str = "") -> Result:
    """``read()``, tried again where it failed in a way that may pass: after 0.1 s, then 0.2 s, 0.4 s, up to 10 s.

    Up to half of each pause is drawn at random, so that workers that failed together do not come back together. The
    error that is raised in the end is the last one, of its own type; a note in it says ``what`` was read (a path) and
    how often it was tried. Raises ``ValueError`` on a negative number of ``retries``.
    """
    pause = 0.1
    for tries in range(1, retries + 2):
        try:
            return read()
        except Exception as error:
            passing = may_pass(error)
            if tries > retries or not passing:
                _note(error, what, tries if passing else 0)
                raise
            _log.info("%s: failed, and is read again in %.1f s: %s", what or "a read", pause, error)
        time.sleep(pause * (1 - _pauses.random() / 2))
        pause = min(2 * pause, 10)
    raise ValueError(f"retries must be at least 0, but got {retries}.")


def _note(error: Exception, what: str, tries: int) -> None:
    if tries:
        text = f"{what or 'A read'}: tried {tries} time{'s' * (tries != 1)}. A larger retries is more patient."
    elif what not in str(error):
        text = f"{what}: not tried again, for this does not pass by waiting."
    else:
        return
    notes = [*getattr(error, "__notes__", ()), text]
    error.__dict__["__notes__"] = notes  # as add_note does, which Python 3.10 has not


def of_reading(error: BaseException) -> bool:
    """Whether an error says that something could not be read, rather than that a program is wrong."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _NETWORK


def may_pass(error: Exception) -> bool:
    """Whether a read that failed so may do better later.

    What the error is in Python says it first, as s3fs and gcsfs translate the answers of a server (a ``RequestTimeout``
    of S3 has the status 400); then the status of the answer: 408, 425, 429 and those of the server, from 500 on.
    """
    if isinstance(error, _FOR_GOOD):
        return False
    if isinstance(error, _PASSING):
        return True
    status = status_of(error)
    if status is not None:
        return status in _PASSING_STATUS or (status >= 500 and status != 501)
    if isinstance(error, OSError):
        return error.errno not in _ERRNOS_FOR_GOOD
    return of_reading(error) and type(error).__name__ not in _SETUP


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status behind an error or what caused it, where its library says it."""
    for _ in range(4):
        found = next((status for status in _statuses(error) if isinstance(status, int) and 100 <= status < 600), None)
        if error is None or found is not None:
            return found
        error = error.__cause__
    return None


def _statuses(error: BaseException | None) -> Iterator[Any]:
    answer: Any = getattr(error, "response", None)
    if isinstance(answer, Mapping):  # of botocore
        answer = answer.get("ResponseMetadata")
        yield answer.get("HTTPStatusCode") if isinstance(answer, Mapping) else None
    for place, name in ((answer, "status_code"), (answer, "status"), (error, "status_code"), (error, "status")):
        yield getattr(place, name, None)
    yield getattr(error, "code", None)  # the last: aiohttp has it, and warns of it
