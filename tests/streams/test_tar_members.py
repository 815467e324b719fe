"""Damaged tar shards: named with file and byte, never read on in silence, and left out where that is asked for."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.streams.runs import resumed, run, run_lanes, saved
from tests.streams.test_tar import ENDS, FORTY, ONE, archive, classes, header_of, write_tar
from unbroken.errors import BadRow
from unbroken.lanes import Lane
from unbroken.streams.reading.tar import read_tar
from unbroken.streams.reading.tar_members import key_of

THREE = header_of("0.cls", b"0") + header_of("1.cls", b"1") + header_of("2.cls", b"2")


def assert_bad(path: Path, before: list[int], *words: str) -> None:
    """The rows before the damage come, then an error with these words, again and again, at the same position."""
    rows = read_tar(path).open(ONE)
    assert classes(next(rows) for _ in before) == before
    state = saved(rows)
    for again in (rows, rows, resumed(read_tar(path), ONE, state)):
        with pytest.raises(BadRow) as caught:
            next(again)
        assert saved(again) == state
        for word in (str(path), *words):
            assert word in str(caught.value)


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
@pytest.mark.parametrize(
    ("data", "before", "words"),
    [
        (THREE, [0, 1], ["byte 3072", "cut short: the two blocks of zeros that end an archive are missing"]),
        (THREE[:2560], [0, 1], ["ends in the middle of the member '2.cls'", "begins at byte 2048"]),
        (THREE[:2100], [0], ["byte 2048", "ends in the middle of a header"]),
        (THREE[:1024] + b"no header of tar".ljust(512) + ENDS, [], ["byte 1024", "no header of tar (bad checksum)"]),
        (THREE + header_of("3.cls", b"3" * 9000)[:4000], [0, 1, 2], ["member '3.cls'", "byte 3072", "9000 bytes"]),
        (
            THREE[:1024] + header_of("x", b"no record", type=tarfile.XHDTYPE) + THREE[1024:],
            [],
            ["byte 1024", "pax header"],
        ),
        (
            THREE[:1024] + header_of("x", b"9 size=x\n", type=tarfile.XHDTYPE) + THREE[1024:],
            [],
            ["'x' in a pax header"],
        ),
        (THREE[:1024] + header_of("x", b"9 size=3\n", type=tarfile.XGLTYPE) + THREE[1024:], [], ["a path or a size"]),
        (THREE[:1024] + header_of("x", b"0.cls", type=tarfile.GNUTYPE_LONGNAME) + ENDS, [], ["ends after a header"]),
        (
            THREE + header_of("x", b"", type=tarfile.GNUTYPE_LONGNAME, size=700)[:512],
            [0, 1],
            ["the middle of a header"],
        ),
        (
            THREE + header_of("x", b"", type=tarfile.XHDTYPE, size=1 << 33)[:512],
            [0, 1],
            ["a header of 8589934592 bytes"],
        ),
        (THREE + header_of("3.cls", b"", size=-5) + ENDS, [0, 1], ["byte 3072", "a member of -5 bytes"]),
        (
            THREE + header_of("3.cls", b"", type=tarfile.GNUTYPE_SPARSE) + ENDS,
            [0, 1],
            ["'3.cls' is stored as a sparse file"],
        ),
        (
            THREE + header_of("x", b"22 GNU.sparse.major=1\n", type=tarfile.XHDTYPE) + header_of("3.cls", b"") + ENDS,
            [0, 1],
            ["byte 3072", "stored as a sparse file", "--sparse"],
        ),
    ],
)
def test_a_damaged_shard_is_named_and_the_position_stays_before_it(
    tmp_path: Path, name: str, data: bytes, before: list[int], words: list[str]
) -> None:
    """Case 31."""
    path = tmp_path / name
    assert_bad(write_tar(path, data), before, *words)


def test_a_group_that_is_cut_short_is_no_row(tmp_path: Path) -> None:
    """Whatever byte the shard ends at: the whole groups before it, then an error."""
    whole = archive(FORTY[:12])
    rows = classes(run(read_tar(write_tar(tmp_path / "whole.tar", whole))))
    for end in range(1, -(-len(whole.rstrip(b"\0")) // 512) * 512 + 1, 301):
        path = write_tar(tmp_path / f"{end}.tar", whole[:end])
        found = []
        with pytest.raises(BadRow, match=rf"{end}\.tar, byte \d+"):
            for row in read_tar(path).open(ONE):
                found.append(row["cls"])
        assert found == rows[: len(found)]


@pytest.mark.parametrize("cut", [1, 10, 100, 5000])
def test_a_compressed_shard_that_cannot_be_unpacked_is_named(tmp_path: Path, cut: int) -> None:
    packed = gzip.compress(archive([(f"{n}.bin", bytes(pow(7, n * i, 251) for i in range(300))) for n in range(60)]))
    path = tmp_path / "a.tgz"
    path.write_bytes(packed[:-cut])
    with pytest.raises(BadRow, match=r"(?s)a\.tgz: cannot be unpacked as gzip beyond byte \d+.*Replace the file"):
        run(read_tar(path))
    path.write_bytes(b"not compressed at all")
    with pytest.raises(BadRow, match=r"cannot be unpacked as gzip beyond byte 0 "):
        run(read_tar(path))


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
@pytest.mark.parametrize(
    ("member", "words"),
    [
        (("1.cls", b"one"), ["(key '1', extension 'cls', 3 bytes) cannot be decoded: ValueError: invalid literal"]),
        (("1.txt", b"\xff"), ["(key '1', extension 'txt', 1 bytes) cannot be decoded: UnicodeDecodeError"]),
        (("1.json", b"{"), ["extension 'json'", "JSONDecodeError"]),
        (
            ("1.a.png", b"no image"),
            ["member '1.a.png' (key '1', extension 'a.png', 8 bytes)", "UnidentifiedImageError"],
        ),
        (("1.npy", b""), ["extension 'npy'"]),
        (("0.cls", b"1"), ["two members are named '0.cls'"]),
        (("0.__key__", b"1"), ["two members are named '0.__key__'"]),
    ],
)
def test_a_member_that_cannot_be_decoded_is_named(
    tmp_path: Path, name: str, member: tuple[str, bytes], words: list[str]
) -> None:
    """Case 31."""
    if "png" in member[0]:
        pytest.importorskip("PIL.Image", reason="images need pillow")
    members = [("x.cls", b"7"), ("0.cls", b"0"), member, ("2.cls", b"2")]
    path = write_tar(tmp_path / name, members)
    assert_bad(path, [7] if member[0].startswith("0") else [7, 0], *words)
    kept = [7, 2] if member[0].startswith("0") else [7, 0, 2]
    stream = read_tar(path, on_error="skip")
    rows = stream.open(ONE)
    assert classes(rows) == kept
    (skips,) = rows.state_dict()["journal"].values()
    assert skips["count"] == 1 and words[0].split(":")[0] in str(skips["named"])


def test_the_rest_of_a_damaged_shard_is_left_out_and_stays_out_after_a_resume(tmp_path: Path) -> None:
    """Case 31."""
    damaged = bytearray(archive(FORTY))
    middle = damaged.index(b"d/0020.txt")
    damaged[middle : middle + 4] = b"torn"
    paths = [write_tar(tmp_path / "a.tar", bytes(damaged)), write_tar(tmp_path / "b.tar", FORTY)]
    stream = read_tar(paths, on_error="skip")
    for lanes in (1, 2, 5):
        ref = run_lanes(stream, lanes)
        found = classes(row for rows in ref for row in rows)
        assert sorted(found) == sorted([*range(19), *range(40)])
        for index in range(lanes):
            rows = stream.open(Lane(index, lanes))
            for k in range(len(ref[index])):
                assert run_on(stream, Lane(index, lanes), saved(rows)) == ref[index][k:]
                next(rows)


def run_on(stream: Any, lane: Lane, state: str) -> list[Any]:
    return list(resumed(stream, lane, state))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("0001.jpg", ("0001", "jpg")),
        ("a/0001.seg.PNG", ("a/0001", "seg.png")),
        ("a.b/c.d/0001.x", ("a.b/c.d/0001", "x")),
        ("./0001.x", ("./0001", "x")),
        ("0001.", ("0001", "")),
        ("0001", None),
        ("a.b/0001", None),
        (".hidden", None),
        ("a/.hidden.x", None),
        ("__meta__/0001.x", None),
        ("__meta__.x", ("__meta__", "x")),
    ],
)
def test_a_key_ends_at_the_first_dot_of_the_base_name(name: str, expected: tuple[str, str] | None) -> None:
    assert key_of(name) == expected
