"""The site builds from the pages and the docstrings, says nothing else than they do, and fetches nothing.

It is built once for all tests here, in a process in which no connection can be made.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest
from typer.main import get_command

import unbroken
import unbroken.fixtures
import unbroken.replay
import unbroken.testing
from unbroken.cli import app

ROOT = Path(__file__).parent.parent
DRAWINGS = sorted((ROOT / "docs" / "assets").glob("*.svg"))
# Without --quiet, which would keep the warnings from --strict.
BUILD = """
import socket, sys

def refuse(*arguments):
    raise OSError(f"The build of the site connects to {arguments[1:]}")

socket.socket.connect = socket.socket.connect_ex = refuse
from mkdocs.__main__ import cli
cli(["build", "--strict", "--site-dir", sys.argv[1]])
"""


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_tools_{name}", ROOT / "docs" / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Reader(HTMLParser):
    """What a page refers to, the names that others refer to it by, and its text: outside of code, and in all."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []  # that a reader follows
        self.fetched: list[str] = []  # that a browser follows by itself
        self.names: set[str] = set()
        self.prose: list[str] = []
        self._code = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.names |= {values[name] for name in ("id", "name") if name in values}
        if "href" in values and tag in ("a", "link"):
            (self.links if tag == "a" else self.fetched).append(values["href"])
        if "src" in values:
            self.fetched.append(values["src"])
        self._code += tag in ("code", "pre", "script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in ("code", "pre", "script", "style")

    def handle_data(self, data: str) -> None:
        self.prose += [data] * (not self._code)


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BUILD, str(site)]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, f"mkdocs build --strict:\n{done.stdout}\n{done.stderr}"
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Reader]:
    return {path: Reader(path.read_text("utf-8")) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def entries(pages: dict[Path, Reader]) -> set[str]:
    return {name for path, page in pages.items() if path.parent.name == "reference" for name in page.names}


def test_a_warning_fails_the_build(tmp_path: Path) -> None:
    """As it would not with --quiet."""
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nplugins: []\ntheme: {name: null, custom_dir: docs}\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "main.html").write_text("{{ page.content }}")
    page = tmp_path / "docs" / "index.md"
    page.write_text("# Here\n")
    assert build(tmp_path, tmp_path / "site").returncode == 0
    page.write_text("# Here\n\n[gone](gone.md)\n")
    assert build(tmp_path, tmp_path / "site").returncode != 0
    assert "mkdocs build --strict\n" in (ROOT / "Makefile").read_text("utf-8")


def test_every_page_is_on_the_site(site: Path) -> None:
    sources = (path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md"))
    assert [path for path in sources if not (site / path).with_suffix(".html").is_file()] == []


def test_nothing_is_fetched_from_elsewhere_when_the_site_is_read(site: Path, pages: dict[Path, Reader]) -> None:
    fetched = [(path.name, url) for path, page in pages.items() for url in page.fetched if urlsplit(url).netloc]
    assert fetched == []
    styles = [*site.rglob("*.css"), *site.rglob("*.svg")]
    assert styles
    for path in styles:
        assert not re.findall(r"""(?:url\(|@import|href=)\s*["']?(?:https?:)?//""", path.read_text("utf-8")), path


def test_every_link_of_the_site_leads_somewhere(pages: dict[Path, Reader]) -> None:
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            found = target.is_file() and (not parts.fragment or unquote(parts.fragment) in pages[target].names)
            dead += [] if found else [f"{path.name}: {link}"]
    assert dead == []


def test_every_public_name_has_an_entry_in_the_reference(pages: dict[Path, Reader]) -> None:
    names = {f"unbroken.{name}" for name in unbroken.__all__}
    names |= {f"unbroken.testing.{name}" for name in unbroken.testing.__all__}
    names |= {f"unbroken.replay.{name}" for name in unbroken.replay.__all__}
    names |= {f"unbroken.fixtures.{name}" for name in unbroken.fixtures.__all__}
    names |= {"unbroken.checkpoints.files.read_position", "unbroken.checkpoints.ledgers.compare_ledgers"}
    names |= {f"unbroken.Stage.{name}" for name in ("map", "filter", "shuffle", "tokenize", "pack", "repeat", "open")}
    assert names - entries(pages) == set(), "a line `::: unbroken.<name>` in a page of docs/reference/ makes one"


def own_members(kind: type) -> set[str]:
    """The public methods and properties of a class that it does not have from elsewhere; not those for the iterator."""
    found = {}
    for base in reversed(kind.__mro__):
        found |= {name: (base, member) for name, member in vars(base).items() if not name.startswith("_")}
    return {
        name
        for name, (base, member) in found.items()
        if base.__module__.startswith("unbroken.") and not (member.__doc__ or "").startswith("For the iterator:")
    }


def test_every_method_of_the_loader_has_an_entry_wherever_it_is_defined(pages: dict[Path, Reader]) -> None:
    names = own_members(unbroken.StatefulDataLoader) - {"multiprocessing_context"}  # torch's own
    assert {"state_dict", "load_state_dict", "state_after", "close", "skip", "skipped", "stats"} <= names
    assert {f"unbroken.StatefulDataLoader.{name}" for name in names} - entries(pages) == set()


def test_every_command_is_in_the_reference(site: Path) -> None:
    def commands(command: Any, path: str) -> list[str]:
        inside = getattr(command, "commands", None)
        return [path] if inside is None else [p for name, c in inside.items() for p in commands(c, f"{path} {name}")]

    names = commands(get_command(app), "unbroken")
    assert len(names) > 5
    text = (site / "reference" / "tools.html").read_text("utf-8")
    assert [name for name in names if f"<code>{name}" not in text] == []


def test_what_the_iterator_of_the_loader_asks_for_is_no_entry(pages: dict[Path, Reader]) -> None:
    assert (
        entries(pages) & {f"unbroken.StatefulDataLoader.{name}" for name in ("start", "delivered", "finish")} == set()
    )


def test_every_argument_that_torch_does_not_have_is_explained(site: Path) -> None:
    arguments = list(inspect.signature(unbroken.StatefulDataLoader).parameters)
    text = (site / "reference" / "loader.html").read_text("utf-8")
    items = " ".join(re.findall(r"<li>\s*(?:<p>)?(.*?)</li>", text, re.DOTALL))
    own = arguments[arguments.index("snapshot_every_n_steps") + 1 :]
    assert len(own) > 10
    assert [name for name in own if f"<code>{name}</code>" not in items] == []


def test_a_method_that_chains_says_what_its_stage_does(site: Path) -> None:
    text = (site / "reference" / "stages.html").read_text("utf-8")
    assert "cross entropy" in text
    assert "See <code>unbroken." not in text


def test_no_markup_is_left_in_the_text(pages: dict[Path, Reader]) -> None:
    marks = re.compile(r"```|^(?:\* |\| |#+ )|\]\(|::$|<!--", re.MULTILINE)
    left = [(path.name, text) for path, page in pages.items() for text in page.prose if marks.search(text)]
    assert left == []


@pytest.mark.parametrize("path", DRAWINGS, ids=[path.name for path in DRAWINGS])
def test_a_drawing_is_on_a_page_and_can_be_read_in_light_and_dark(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    name = "{http://www.w3.org/2000/svg}"
    assert root.findtext(f"{name}title") and root.findtext(f"{name}desc")
    assert "prefers-color-scheme: dark" in (root.findtext(f"{name}style") or "")
    paper = root.find(f"{name}rect")
    assert paper is not None and paper.get("class") == "paper", "the drawing has a ground of its own"
    assert any(f"assets/{path.name})" in page.read_text("utf-8") for page in (ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("path", DRAWINGS, ids=[path.name for path in DRAWINGS])
def test_what_is_drawn_lies_on_the_paper(path: Path) -> None:
    """Of a text only its anchor can be told without a font; 6 units a letter are enough for those in use."""
    root = ElementTree.parse(path).getroot()
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        kinds, letters = text.get("class", "").split(), len(text.text or "")
        long = letters * (6.0 if "small" in kinds else 7.8)
        left = float(text.get("x", 0)) - long / 2 * ("mid" in kinds)
        assert 0 <= left and left + long <= width and 0 < float(text.get("y", 0)) < height, text.text


# What prepares pages and docstrings, on texts made up for it.

PROSE = """What it does.

seed: a whole number, or ``None``; see ``Lane``
    and :func:`rows_of`.
first, or second (of both): two
    of them.

A list:

* ``one``: goes
  on here, as in::

      x = 1

      y = 2

  and here.
* two

::

    root
    +-- leaf (of the root)    what it is

It raises ``ValueError``."""


def test_a_docstring_becomes_markdown() -> None:
    links = {"Lane": "unbroken.Lane", "rows_of": "unbroken.testing.rows_of"}
    expected = """What it does.

* `seed`: a whole number, or ``None``; see [`Lane`][unbroken.Lane] and [`rows_of`][unbroken.testing.rows_of].
* `first`, or `second` (of both): two of them.

A list:

* ``one``: goes
    on here, as in:

    ```python
    x = 1

    y = 2
    ```

    and here.
* two


```text
root
+-- leaf (of the root)    what it is
```

It raises ``ValueError``."""
    assert tool("docstrings").as_markdown(PROSE, ["seed", "first", "second"], links) == expected


def test_a_table_of_a_docstring_becomes_one_of_markdown() -> None:
    table = "What:\n\n======= =====\n``a``   one:\n        two\n``b``\n======= =====\n\nMore."
    assert tool("docstrings").as_markdown(table, [], {}) == (
        "What:\n\n|  |  |\n| --- | --- |\n| ``a`` | one: two |\n| ``b`` |  |\n\nMore."
    )


def test_a_paragraph_that_only_looks_like_an_argument_stays_one() -> None:
    text = "The rest: nothing.\n\nfirst: one\nand more: another"
    assert tool("docstrings").as_markdown(text, ["first"], {}) == text


@pytest.mark.parametrize(
    ("page", "place", "expected"),
    [
        ("[a](../examples/train.py)", "index.md", "[a](files/examples/train.md)"),
        ("[a](../../examples/train.py)", "how-to/x.md", "[a](../files/examples/train.md)"),
        ("[a](../src/unbroken/README.md#who)", "index.md", "[a](files/src/unbroken.md#who)"),
        ("[a](../guarantees.md#the-law)", "how-to/x.md", "[a](../guarantees.md#the-law)"),
        ("[a](../../examples/gone.py)", "how-to/x.md", "[a](../../examples/gone.py)"),
        ("<!-- not run: a bucket -->\n```python\n", "index.md", "```python\n"),
        ("<!-- output -->\n```text\n1\n```", "index.md", '```text title="Output"\n1\n```'),
        ("- a\n\n  <!-- output -->\n  ```text\n", "index.md", '- a\n\n  ```text title="Output"\n'),
    ],
)
def test_a_page_of_the_repository_becomes_one_of_the_site(page: str, place: str, expected: str) -> None:
    assert tool("pages").for_site(page, place) == expected


def test_a_how_to_page_that_the_nav_does_not_name_comes_last() -> None:
    nav = ["index.md", {"How to": ["how-to/b.md", "how-to/a.md"]}, {"Reference": ["reference/x.md"]}]
    pages = ["how-to/d.md", "how-to/a.md", "how-to/b.md", "how-to/c.md", "index.md", "reference/x.md", "reference/y.md"]
    assert tool("pages").with_all_of("how-to/", nav, pages) == [
        "index.md",
        {"How to": ["how-to/b.md", "how-to/a.md", "how-to/c.md", "how-to/d.md"]},
        {"Reference": ["reference/x.md"]},
    ]
