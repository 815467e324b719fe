"""Every example in the docs runs, and every link leads somewhere.

The blocks of a page marked ``python`` run in order, in one namespace, in a process and a folder of their own. A block
after the comment ``<!-- not run: reason -->`` is only compiled (a program for several processes, say). A ``text`` block
after the comment ``<!-- output -->`` is what the ``python`` block before it prints. Nothing else is looked at.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w-]*)")
COMMENT = re.compile(r"<!-- (?P<what>not run: *(?P<reason>.*\S)|output) -->")
LINK = re.compile(r"\]\((?P<target>[^)\s#]*)(?:#(?P<heading>[^)\s]*))?\)")
MOST_SECONDS = 60


@dataclass(frozen=True)
class Block:
    """A fenced block: its first line in the page (from 1), its text without indentation, the comment before it."""

    line: int
    language: str
    text: str
    comment: str


def blocks_of(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order. Raises ``ValueError`` where one has no end."""
    lines = page.splitlines()
    number, comment = 0, ""
    while number < len(lines):
        fence = FENCE.match(lines[number])
        if fence is None:
            found = COMMENT.fullmatch(lines[number].strip())
            comment = found["what"] if found else "" if lines[number].strip() else comment
            number += 1
            continue
        first = number + 1
        indent, end = len(fence["indent"]), fence["indent"] + fence["ticks"]
        number = next((n for n in range(first, len(lines)) if lines[n].rstrip() == end), len(lines))
        if number == len(lines):
            raise ValueError(f"line {first}: the block that begins here has no end")
        text = "\n".join(line[indent:] for line in lines[first:number])
        yield Block(first + 1, fence["language"], text, comment)
        number, comment = number + 1, ""


def script_of(page: str) -> tuple[str, dict[int, str]]:
    """The code of a page, each line where it stands in the page, so that a traceback names the page's lines.

    After each block a line with NUL is printed. Also the outputs that the page shows: number of the block, text.
    """
    lines = [""] * (len(page.splitlines()) + 1)
    expected: dict[int, str] = {}
    ran = 0
    for block in blocks_of(page):
        if block.language == "python" and not block.comment.startswith("not run"):
            code = block.text.split("\n")
            lines[block.line - 1 : block.line - 1 + len(code)] = code
            lines[block.line - 1 + len(code)] = r'print("\0")'
            ran += 1
        elif block.comment == "output":
            expected[ran - 1] = block.text
    return "\n".join(lines), expected


def faults_of(page: str, name: str, folder: Path) -> list[str]:
    """What is wrong with the examples of a page, run in a folder."""
    faults = []
    for block in blocks_of(page):
        if block.language == "python" and block.comment.startswith("not run"):
            try:
                compile(block.text, name, "exec")
            except SyntaxError as error:
                faults.append(f"{name}, line {block.line + (error.lineno or 1) - 1}: {error.msg}")
    text, expected = script_of(page)
    if not text.strip():
        return faults
    script = folder / f"{name.replace('.', '_').replace('-', '_')}.py"
    script.write_text(text)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=MOST_SECONDS)
    if done.returncode:
        return [*faults, f"{name} (line numbers are the page's)\n{done.stderr}"]
    printed = [part.removeprefix("\n").removesuffix("\n") for part in done.stdout.split("\0")]
    return faults + [
        f"{name}: a block prints\n{printed[number]}\nand the page shows\n{shown}"
        for number, shown in expected.items()
        if number < 0 or printed[number] != shown
    ]


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_the_examples_run(page: Path, tmp_path: Path) -> None:
    faults = faults_of(page.read_text("utf-8"), page.name, tmp_path)
    assert not faults, "\n".join(faults)


def prose_of(page: str) -> str:
    """A page without its blocks: what looks like a heading or a link in code is none."""
    lines = page.splitlines()
    for block in blocks_of(page):
        first = block.line - 2
        lines[first : first + block.text.count("\n") + 3] = [""] * (block.text.count("\n") + 3)
    return "\n".join(lines)


def headings_of(page: str) -> set[str]:
    """The names that links call the headings of a page by."""
    titles = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(page: str, path: Path) -> list[str]:
    dead = []
    for link in LINK.finditer(prose_of(page)):
        if "://" in link["target"]:
            continue
        target = path.parent / link["target"]
        text = page if not link["target"] else target.read_text("utf-8") if target.is_file() else ""
        if not target.exists() or (link["heading"] and link["heading"] not in headings_of(text)):
            dead.append(link[0])
    return dead


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_the_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page.read_text("utf-8"), page) == []


# The checks themselves, on pages made up for them.

SOUND = """
# A page

```python
rows = [1, 2]
print(rows)
print()
```

<!-- output -->
```text
[1, 2]

```

1. In a list:

   ```python
   from pathlib import Path

   rows.append(3)
   Path("here").touch()
   ```

<!-- not run: needs three machines -->

```python
await_the(rows) / 0
```

```console
false
```

````text
```python
1 / 0
```
````

```python
print(len(rows))
```

<!-- output -->
```text
3
```
"""


def test_a_sound_page_has_no_faults(tmp_path: Path) -> None:
    assert faults_of(SOUND, "page.md", tmp_path) == []
    assert (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("sound", "broken", "fault"),
    [
        ("rows.append(3)", "raise KeyError('no row')", r"line 21(?s:.*)KeyError: 'no row'"),
        ("rows.append(3)", "assert rows == [2]", "AssertionError"),
        ("rows = [1, 2]", "rows = [1, 2", r"line 5(?s:.*)SyntaxError"),
        ("rows = [1, 2]", "pass", "NameError"),
        ("await_the(rows) / 0", "await_the(rows", "page.md, line 28: .*never closed"),
        ("<!-- not run: needs three machines -->", "", "NameError: name 'await_the'"),
        ("<!-- not run: needs three machines -->", "<!-- not run: -->", "NameError: name 'await_the'"),
        ("<!-- not run: needs three machines -->", "<!-- not run: why -->\nSo:", "NameError: name 'await_the'"),
        ("print(len(rows))", "print(len(rows) + 1)", "prints\n4\nand the page shows\n3"),
        ("print(len(rows))", "print(len(rows), end='')\nimport os; os._exit(3)", "page.md"),
        ("[1, 2]\n\n```", "[1, 2]\n```", "prints"),
    ],
)
def test_a_broken_page_has_a_fault(sound: str, broken: str, fault: str, tmp_path: Path) -> None:
    assert sound in SOUND
    (found,) = faults_of(SOUND.replace(sound, broken), "page.md", tmp_path)
    assert re.search(fault, found)


def test_a_block_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 3"):
        faults_of("\n\n```python\nprint(1)\n", "page.md", tmp_path)


def test_a_page_without_code_starts_no_process(tmp_path: Path) -> None:
    assert faults_of("# Words\n\nNone of them run.\n", "page.md", tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    path, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# The law\n\n```python\n# no heading\n```\n")
    page = "# Here\n```python\nf[0](x)\n```\n[a](other.md) [b](other.md#the-law) [c](#here) [d](https://example.com/x) "
    assert dead_links(page, path) == []
    assert dead_links(page + "[e](gone.md) [f](other.md#no-heading) [g](#there)", path) == [
        "](gone.md)",
        "](other.md#no-heading)",
        "](#there)",
    ]
