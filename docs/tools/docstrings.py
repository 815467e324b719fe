"""Docstrings as Markdown: an extension of griffe, which reads them for the reference (see ``mkdocs.yml``).

The docstrings are prose, with what Python programs are used to: ``::`` before a literal block, lists whose items go on
with two spaces, paragraphs that begin with the name of an argument, tables between lines of ``=``, and names of the
package in double backticks.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import griffe

PACKAGE = "unbroken"
INSIDE = "For the iterator:"  # begins what is said of methods of the loader that are for its iterator alone
SEE = re.compile(r"\s*See ``(?P<path>unbroken\.[\w.]+)``\.$")
TABLE = re.compile(r"^(?P<edge>(?:=+ +)+=+)\n(?P<rows>(?:.*\n)*?)(?P=edge)$", re.MULTILINE)
NAME = re.compile(r"(?::\w+:`(?P<role>[\w.]+)`|``(?P<name>\w+)``)")


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Griffe's hook: nothing of another package is touched."""
        if pkg.path != PACKAGE:
            return
        loaders = pkg["loader.StatefulDataLoader"]
        for name, member in list(loaders.members.items()):
            if member.docstring and member.docstring.value.startswith(INSIDE):
                loaders.del_member(name)
        public = {name: f"{PACKAGE}.{name}" for name in map(str, pkg.exports or ())} | classes_of_methods(pkg)
        texts = {each.path: each.docstring.value for each in objects_of(pkg) if each.docstring}
        for each in objects_of(pkg):
            if each.docstring:
                text = followed(each.docstring.value, texts)
                known = public | local_names(each)
                own = {each.path, *(f"{PACKAGE}.{part}" for part in each.path.split("."))}
                links = {name: path for name, path in known.items() if path not in own}
                each.docstring.value = as_markdown(text, parameters_of(each), links)


def classes_of_methods(package: griffe.Module) -> dict[str, str]:
    """The classes that methods of ``Stage`` send to, and the methods, which stand in their place in the reference."""
    found = {}
    stage = package["streams.stage.Stage"]
    for name, member in stage.members.items():
        see = SEE.search(member.docstring.value) if member.docstring else None
        if see:
            found[see["path"].rpartition(".")[2]] = f"{PACKAGE}.Stage.{name}"
    return found


def objects_of(top: griffe.Object) -> Iterator[griffe.Object]:
    """An object and all that is defined in it."""
    yield top
    for member in top.members.values():
        if isinstance(member, griffe.Object):
            yield from objects_of(member)


def parameters_of(each: griffe.Object) -> set[str]:
    """The names of the arguments of a function, or of a class when it is called."""
    if isinstance(each, griffe.Class):
        each = each.members.get("__init__", each)  # type: ignore[assignment]
    return {parameter.name for parameter in each.parameters} if isinstance(each, griffe.Function) else set()


def local_names(each: griffe.Object) -> dict[str, str]:
    """The exported names of the module that an object is defined in, where that is one users import from."""
    module = each.module
    if module.path not in (f"{PACKAGE}.testing", f"{PACKAGE}.fixtures", f"{PACKAGE}.replay"):
        return {}
    return {name: f"{module.path}.{name}" for name in map(str, module.exports or ())}


def followed(text: str, texts: Mapping[str, str]) -> str:
    """A docstring that ends in "See ``unbroken.x.Y``." goes on with the docstring of that instead."""
    see = SEE.search(text)
    if see is None or see["path"] not in texts:
        return text
    first, _, rest = texts[see["path"]].partition("\n\n")
    begin = text[: see.start()]
    return f"{begin}\n\n{rest}" if same(begin, first) else f"{begin}\n\n{texts[see['path']]}"


def same(text: str, other: str) -> bool:
    """Whether two sentences say the same in the same words."""
    return re.findall(r"\w+", text)[:4] == re.findall(r"\w+", other)[:4]


def as_markdown(text: str, parameters: Iterable[str], links: Mapping[str, str]) -> str:
    """A docstring as Markdown. ``links`` are the names to be linked, and where to."""
    text = with_blocks(with_deeper_items(with_tables(text)))
    parts = re.split(r"(^ *```(?s:.*?)^ *```$)", text, flags=re.MULTILINE)
    parts[::2] = [linked(with_arguments(part, set(parameters)), links) for part in parts[::2]]
    return "".join(parts)


def with_tables(text: str) -> str:
    """Tables of reStructuredText, without a head. A row whose first column is empty goes on with the one above."""

    def table(found: re.Match[str]) -> str:
        starts = [column.start() for column in re.finditer("=+", found["edge"])]
        rows: list[list[str]] = []
        for line in found["rows"].splitlines():
            cells = [line[at:end].strip() for at, end in zip(starts, [*starts[1:], None], strict=True)]
            if cells[0]:
                rows.append(cells)
            else:
                rows[-1] = [f"{above} {cell}".strip() for above, cell in zip(rows[-1], cells, strict=True)]
        empty, line = [[""] * len(starts)], [["---"] * len(starts)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (*empty, *line, *rows))

    return TABLE.sub(table, text)


def with_deeper_items(text: str) -> str:
    """What belongs to an item of a list begins four spaces in, as Python-Markdown wants it, and not two."""
    lines, inside = [], False
    for line in text.splitlines():
        if line.startswith("* "):
            inside = True
        elif line and not line.startswith("  "):
            inside = False
        lines.append(f"  {line}" if inside and line.startswith("  ") else line)
    return "\n".join(lines)


def with_blocks(text: str) -> str:
    """Literal blocks are fenced, as Python where they are Python."""
    lines, found = text.splitlines(), []
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if not line.endswith("::"):
            found.append(line)
            continue
        base = len(line) - len(line.lstrip())
        block = []
        while number < len(lines) and (not lines[number] or len(lines[number]) - len(lines[number].lstrip()) > base):
            block.append(lines[number])
            number += 1
        code = textwrap.dedent("\n".join(block)).strip("\n")
        language = language_of(code)
        fenced = f"```{language}\n{code if language == 'python' else code.replace('``', '')}\n```"
        before = [line[:-1]] if line.strip() != "::" else []
        found += [*before, "", *textwrap.indent(fenced, " " * base).splitlines(), ""]
    return "\n".join(found)


def language_of(code: str) -> str:
    try:
        compile(code, "docstring", "exec")
    except SyntaxError:
        return "text"
    return "python"


def with_arguments(text: str, parameters: set[str]) -> str:
    """Paragraphs that begin with names of arguments, and go on four spaces in, become items of a list."""
    blocks = re.split(r"(\n{2,})", text)
    for place, block in enumerate(blocks[::2]):
        items = re.split(r"\n(?! )", block.strip("\n"))
        named = [re.match(r"\w+", item) for item in items]
        if all(": " in item and name and name[0] in parameters for item, name in zip(items, named, strict=True)):
            blocks[2 * place] = "\n".join(as_item(item, parameters) for item in items)
    return "".join(blocks)


def as_item(item: str, parameters: set[str]) -> str:
    term, _, rest = re.sub(r"\n +", " ", item).partition(": ")
    parts = re.split(r"(``[^`]*``|\([^()]*\))", term)
    parts[::2] = [re.sub(r"\w+", lambda word: code(word[0], parameters), part) for part in parts[::2]]
    return f"* {''.join(parts)}: {rest}"


def code(word: str, parameters: set[str]) -> str:
    return f"`{word}`" if word in parameters else word


def linked(text: str, links: Mapping[str, str]) -> str:
    """Names of the package lead to their entries."""

    def link(found: re.Match[str]) -> str:
        name = found["role"] or found["name"]
        return f"[`{name}`][{links[name]}]" if name in links else f"`{name}`" if found["role"] else found[0]

    return NAME.sub(link, text)
