"""Reading again: what may pass is tried again, what does not pass is told at once, and by name."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from types import SimpleNamespace

import aiohttp
import multidict
import pytest
import yarl
from botocore.exceptions import ClientError, HTTPClientError, NoCredentialsError
from botocore.parsers import ResponseParserError
from fsspec.exceptions import FSTimeoutError
from s3fs.errors import translate_boto_error

from unbroken.streams.reading import retrying
from unbroken.streams.reading.retrying import patiently


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that would have been made."""
    made: list[float] = []
    monkeypatch.setattr(retrying, "time", SimpleNamespace(sleep=made.append))
    return made


class Failing:
    """Fails so many times, then answers."""

    def __init__(self, times: int, error: Exception) -> None:
        self.times, self.error, self.tries = times, error, 0

    def __call__(self) -> str:
        self.tries += 1
        if self.tries <= self.times:
            raise self.error
        return "answer"


def answered(code: str, status: int) -> ClientError:
    """An answer of S3 as botocore raises it."""
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")


def translated(code: str, status: int) -> Exception:
    """The same as s3fs raises it."""
    error: Exception = translate_boto_error(answered(code, status))
    return error


def over_http(status: int) -> aiohttp.ClientResponseError:
    url = yarl.URL("http://host/a.jsonl")
    return aiohttp.ClientResponseError(
        aiohttp.RequestInfo(url, "GET", multidict.CIMultiDictProxy(multidict.CIMultiDict()), url), (), status=status
    )


PASSING: list[Callable[[], Exception]] = [
    lambda: OSError(errno.EIO, "read failed"),
    lambda: OSError(errno.ESTALE, "stale handle"),
    lambda: OSError("some words"),
    TimeoutError,
    ConnectionResetError,
    FSTimeoutError,
    lambda: answered("SlowDown", 503),
    lambda: answered("TooManyRequests", 429),
    lambda: translated("SlowDown", 503),
    lambda: translated("InternalError", 500),
    lambda: translated("RequestTimeout", 400),
    lambda: translated("UnheardOf", 502),
    lambda: HTTPClientError(error="connection lost"),
    lambda: ResponseParserError("no XML"),
    lambda: aiohttp.ClientPayloadError("cut short"),
    lambda: over_http(503),
]
FOR_GOOD: list[Callable[[], Exception]] = [
    lambda: FileNotFoundError(errno.ENOENT, "no such file"),
    lambda: PermissionError(errno.EACCES, "not allowed"),
    lambda: IsADirectoryError(errno.EISDIR, "a folder"),
    lambda: OSError(errno.ENAMETOOLONG, "too long"),
    lambda: answered("AccessDenied", 403),
    lambda: answered("NoSuchKey", 404),
    lambda: translated("AccessDenied", 403),
    lambda: translated("NoSuchKey", 404),
    lambda: translated("InvalidRange", 416),
    lambda: translated("UnheardOf", 400),
    lambda: over_http(404),
    lambda: over_http(501),
    NoCredentialsError,
    lambda: ValueError("a bug"),
]


@pytest.mark.parametrize("make", PASSING)
@pytest.mark.parametrize("times", [1, 3])
def test_what_may_pass_is_tried_again(make: Callable[[], Exception], times: int, pauses: list[float]) -> None:
    """Case 31."""
    read = Failing(times, make())
    assert patiently(read, 3) == "answer"
    assert read.tries == times + 1 and len(pauses) == times


@pytest.mark.parametrize("make", FOR_GOOD)
def test_what_does_not_pass_is_raised_at_once(make: Callable[[], Exception], pauses: list[float]) -> None:
    error = make()
    read = Failing(1, error)
    with pytest.raises(type(error)) as caught:
        patiently(read, 5, "s3://bucket/a.jsonl")
    assert caught.value is error
    assert read.tries == 1 and pauses == []
    assert error.__notes__ == ["s3://bucket/a.jsonl: not tried again, for this does not pass by waiting."]


@pytest.mark.parametrize("retries", [0, 1, 4])
@pytest.mark.parametrize("make", PASSING)
def test_the_last_error_is_raised_as_it_is_with_the_path_and_the_tries(
    make: Callable[[], Exception], retries: int, pauses: list[float]
) -> None:
    error = make()
    read = Failing(100, error)
    with pytest.raises(type(error)) as caught:
        patiently(read, retries, "far://a.jsonl")
    assert caught.value is error
    assert read.tries == retries + 1 and len(pauses) == retries
    (note,) = error.__notes__
    assert note.startswith(f"far://a.jsonl: tried {retries + 1} time{'s' * (retries > 0)}.")


def test_an_error_that_names_its_path_gets_no_note() -> None:
    error = FileNotFoundError(errno.ENOENT, "no such file", "/data/a.jsonl")
    with pytest.raises(FileNotFoundError):
        patiently(Failing(1, error), 5, "/data/a.jsonl")
    assert not hasattr(error, "__notes__")


def test_pauses_double_up_to_ten_seconds_and_are_cut_by_up_to_half_at_random(pauses: list[float]) -> None:
    patiently(Failing(12, OSError("again")), 12)
    longest = [min(0.1 * 2**n, 10) for n in range(12)]
    assert all(whole / 2 <= pause <= whole for pause, whole in zip(pauses, longest, strict=True))


def test_pauses_draw_from_no_generator_of_the_user() -> None:
    before = random.getstate()
    patiently(Failing(5, OSError("again")), 5)
    assert random.getstate() == before


def test_fewer_than_no_retries_are_refused() -> None:
    with pytest.raises(ValueError, match="retries must be at least 0, but got -1"):
        patiently(Failing(0, OSError()), -1)
