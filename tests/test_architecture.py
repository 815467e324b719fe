"""The import rule and the budgets, which keep every behaviour where the tree says it is.

The checks read source text and import nothing of the package, so they also judge a file that cannot be imported. Each
is a function from sources to faults; the second half of this file shows each of them a source that it must refuse.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "unbroken"
ROOT = Path(__file__).parent.parent / "src" / PACKAGE
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(ROOT.rglob("*.py"))}

# Lowest first. A module imports from lower layers only; within one layer see PEERS and ``objection_within``.
LAYERS = [
    {"errors"},
    {"factories", "state"},
    PEERS := {
        "anchor",
        "contexts",
        "display",
        "epochs",
        "lane_position",
        "lanes",
        "leaves",
        "ledger",
        "lineage",
        "locks",
        "made",
        "meters",
        "options",
        "ordering",
        "position",
        "prefetched",
        "sampling",
        "seeding",
        "skipped",
        "stats",
        "steps",
        "trail",
    },
    {"engine", "streams"},
    {"loader"},
    {"audit", "checkpoints"},
    {"replay", "testing"},
    {"fixtures"},
    {PACKAGE},
    {"demo"},
    {"__main__", "cli"},
]
ENGINE_LAYERS = [
    {
        "channel",
        "copies",
        "datapipes",
        "empty",
        "engine",
        "opening",
        "pace",
        "pinning",
        "progress",
        "ring",
        "signals",
        "skipping",
    },
    {"cursor", "front", "notes", "wire"},
    {"custom", "host"},
    {"turns", "worker"},
    {"process"},
    {"crew"},
    {"feeds", "inline", "pool", "threads"},
    {"agree", "epoch", "rows", "stored"},
    {"measured", "setup"},
]
LAYER = {name: height for height, names in enumerate(LAYERS) for name in names}
ENGINE_LAYER = {name: height for height, names in enumerate(ENGINE_LAYERS) for name in names}
# What every stage may use: none of it is a stage.
UNDER_STAGES = {"arguments", "best_fit", "course", "gauge", "identity", "packed", "weights"}
FORMATS = {"arrow", "huggingface", "jsonl", "parquet", "tar", "tokens"}
LIBRARIES = {
    "PIL": {"streams.reading.tar"},
    "datasets": set(),  # what is asked of its objects needs no import
    "pyarrow": {"streams.reading.arrow", "streams.reading.columns", "streams.reading.parquet"},
    "tokenizers": {"streams.tokenize", "demo.corpus"},  # the demo trains one
    "zstandard": {"streams.reading.compressed"},
}

MOST_FILE_LINES, MOST_FUNCTION_LINES, MOST_ATTRIBUTES, MOST_PARAMETERS = 400, 60, 12, 8
# It takes the place of torch's class, so its parameters and attributes are torch's.
DROP_IN = "StatefulDataLoader"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Where each part of a source keeps the name that it gives.
NAMING = {ast.alias: "asname", ast.arg: "arg", ast.Attribute: "attr", ast.ClassDef: "name", ast.Name: "id"}
NAMING |= dict.fromkeys((*FUNCTIONS, ast.ExceptHandler, ast.MatchAs), "name")
WORD_STARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
UNUSED_WORDS = re.compile(r"(?:^|_)(nodes?|pipes?|snapshot_stores?|canonical\w*|cookers?|flavou?rs?)(?:_|$)")


@dataclass(frozen=True)
class Import:
    importer: str
    target: str
    line: int
    deferred: bool  # inside a function, or for the type checker alone: not when the module is imported


def module_of(path: str) -> str:
    """The name inside the package: ``streams/stage.py`` is ``streams.stage``, ``streams/__init__.py`` ``streams``."""
    return path.removesuffix(".py").removesuffix("__init__").rstrip("/").replace("/", ".") or PACKAGE


def parts_below(tree: ast.AST, deferred: bool = False) -> Iterator[tuple[Any, bool]]:
    for part in ast.iter_child_nodes(tree):
        typing_only = isinstance(part, ast.If) and "TYPE_CHECKING" in ast.unparse(part.test)
        inside = deferred or typing_only or isinstance(part, (*FUNCTIONS, ast.Lambda))
        yield part, inside
        yield from parts_below(part, inside)


def parts_of(sources: Mapping[str, str]) -> Iterator[tuple[str, Any, bool]]:
    """``(path, part, deferred)`` for every part of every source, from the outside in."""
    for path, text in sources.items():
        yield from ((path, part, deferred) for part, deferred in parts_below(ast.parse(text)))


def imported(part: ast.AST, path: str) -> Iterator[tuple[str, str]]:
    """The absolute ``(module, name)`` of each import in a statement; the name is empty for ``import module``."""
    if isinstance(part, ast.Import):
        yield from ((alias.name, "") for alias in part.names)
    elif isinstance(part, ast.ImportFrom):
        package = [PACKAGE, *Path(path).parent.parts]
        above = package[: len(package) - part.level + 1] if part.level else []
        base = ".".join([*above, *([part.module] if part.module else [])])
        yield from ((base, alias.name) for alias in part.names)
    elif isinstance(part, ast.Call) and ast.unparse(part.func).endswith(("import_module", "__import__")):
        yield from ((str(argument.value), "") for argument in part.args[:1] if isinstance(argument, ast.Constant))


def inner_imports(sources: Mapping[str, str]) -> list[Import]:
    modules = {module_of(path) for path in sources}.union(*LAYERS)
    found = []
    for path, part, deferred in parts_of(sources):
        for base, name in imported(part, path):
            top, _, inside = base.partition(".")
            member = f"{inside}.{name}".strip(".")
            if top == PACKAGE:
                target = member if member in modules else inside or PACKAGE
                found.append(Import(module_of(path), target, part.lineno, deferred))
    return found


def objection(edge: Import) -> str | None:
    """Why a module may not import another; ``None`` where it may."""
    upper, lower = edge.importer.split(".")[0], edge.target.split(".")[0]
    if upper == lower:
        return objection_within(edge)
    if upper == "audit" and lower not in {"errors", "factories", "state"}:
        return "audit imports only errors, factories and state, for it judges the rest"
    if LAYER.get(lower, -1) < LAYER.get(upper, -1) or {upper, lower} <= PEERS:
        return None
    return "imports go down only"


def objection_within(edge: Import) -> str | None:
    """The rule inside a package."""
    if edge.target.startswith(f"{edge.importer}."):
        return None  # a package gathers its modules
    if edge.importer.startswith(f"{edge.target}."):
        return "a module does not import the package that it lies in"
    top, _, importer = edge.importer.partition(".")
    target = edge.target.partition(".")[2]
    if top == "engine" and ENGINE_LAYER.get(target, -1) >= ENGINE_LAYER.get(importer, -1):
        return "imports go down only: pool, inline > worker > cursor, wire > copies, opening, ring"
    if top == "streams":
        if importer.startswith("reading.") and target.startswith("reading."):
            return "formats do not import formats" if target.removeprefix("reading.") in FORMATS else None
        # The methods that chain stages live on Stage, so it alone knows the others, and only once they are called.
        if importer == "read" and target.startswith("reading."):
            return None  # it chooses among the formats
        if target not in {"stage", *UNDER_STAGES} and not (importer == "stage" and edge.deferred):
            return "stages do not import stages"
    return None


def import_faults(sources: Mapping[str, str]) -> list[str]:
    faults = []
    for module in map(module_of, sources):
        top, _, inside = module.partition(".")
        if top not in LAYER or (top == "engine" and inside and inside not in ENGINE_LAYER):
            faults.append(f"{module} has no place in LAYERS or ENGINE_LAYERS")
    return faults + [
        f"{edge.importer}:{edge.line} imports {edge.target}: {reason}"
        for edge in inner_imports(sources)
        if (reason := objection(edge))
    ]


def cycle_faults(sources: Mapping[str, str]) -> list[str]:
    below: dict[str, set[str]] = {}
    for edge in inner_imports(sources):
        if not edge.deferred:
            below.setdefault(edge.importer, set()).add(edge.target)
    try:
        graphlib.TopologicalSorter(below).prepare()
    except graphlib.CycleError as error:
        return ["a cycle of imports: " + " < ".join(error.args[1])]
    return []


def library_faults(sources: Mapping[str, str]) -> list[str]:
    return [
        f"{path}:{part.lineno} imports {library}, which only {sorted(LIBRARIES[library])} may"
        for path, part, _ in parts_of(sources)
        for base, _ in imported(part, path)
        if (library := base.split(".")[0]) in LIBRARIES and module_of(path) not in LIBRARIES[library]
    ]


def assert_faults(sources: Mapping[str, str]) -> list[str]:
    return [
        f"{path}:{part.lineno} asserts: a user gets an error with a name, and python -O drops an assert"
        for path, part, _ in parts_of(sources)
        if isinstance(part, ast.Assert)
    ]


def names_given(sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """``(where, name)`` of what the sources name. What they only use (``multiprocessing.Pipe``) has others' names."""
    yield from ((path, Path(path).stem) for path in sources)
    for path, part, _ in parts_of(sources):
        name = getattr(part, NAMING.get(type(part), ""), None)
        if name and isinstance(getattr(part, "ctx", ast.Store()), ast.Store):
            yield f"{path}:{part.lineno}", name


def word_faults(sources: Mapping[str, str]) -> list[str]:
    return [
        f"{where} names {name!r}: {match[1]!r} is not a word of this project"
        for where, name in names_given(sources)
        if (match := UNUSED_WORDS.search(WORD_STARTS.sub("_", name).lower()))
    ]


def fields_of(cls: ast.ClassDef) -> list[ast.AnnAssign]:
    return [
        part
        for part in cls.body
        if isinstance(part, ast.AnnAssign) and not re.search(r"\b(ClassVar|KW_ONLY)\b", ast.unparse(part.annotation))
    ]


def attributes_of(cls: ast.ClassDef) -> set[str]:
    """What an instance carries: declared fields, and whatever any method sets on its first parameter."""
    names = {ast.unparse(field.target) for field in fields_of(cls)}
    for method in cls.body:
        static = "staticmethod" in map(ast.unparse, getattr(method, "decorator_list", []))
        if static or not isinstance(method, FUNCTIONS) or not method.args.args:
            continue
        me = method.args.args[0].arg
        for part in ast.walk(method):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == me:
                names.add(part.attr)
            elif isinstance(part, ast.Call) and ast.unparse(part.func) == "object.__setattr__":
                names.add(ast.unparse(part.args[1]).strip("'\""))
    return names


def parameters_of(cls: ast.ClassDef) -> int:
    """How many values a written constructor takes; one that ``dataclass`` makes has the budget of its attributes."""
    for method in cls.body:
        if isinstance(method, ast.FunctionDef) and method.name in {"__init__", "__new__"}:
            given, several = method.args, [method.args.vararg, method.args.kwarg]
            return len([*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, several)]) - 1
    return 0


def budget_faults(sources: Mapping[str, str]) -> list[str]:
    measures = [(path, "lines", len(text.splitlines()), MOST_FILE_LINES) for path, text in sources.items()]
    for path, part, _ in parts_of(sources):
        if isinstance(part, FUNCTIONS):
            length = part.end_lineno - part.lineno + 1
            measures.append((f"{path}:{part.lineno} {part.name}", "lines", length, MOST_FUNCTION_LINES))
        elif isinstance(part, ast.ClassDef) and part.name != DROP_IN:
            where = f"{path}:{part.lineno} {part.name}"
            measures.append((where, "attributes", len(attributes_of(part)), MOST_ATTRIBUTES))
            measures.append((where, "constructor parameters", parameters_of(part), MOST_PARAMETERS))
    return [f"{where} has {count} {unit}, and may have {most}" for where, unit, count, most in measures if count > most]


@pytest.mark.parametrize(
    "check", [import_faults, cycle_faults, library_faults, assert_faults, word_faults, budget_faults]
)
def test_the_package_keeps_the_rules(check: Callable[[Mapping[str, str]], list[str]]) -> None:
    assert "errors.py" in SOURCES, "the checks look at nothing"
    assert check(SOURCES) == []


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("errors.py", "import unbroken.state", "imports go down only"),
        ("lanes.py", "def f():\n    from unbroken import loader", "imports go down only"),
        ("lanes.py", "from importlib import import_module\nimport_module('unbroken.cli')", "imports go down only"),
        ("loader.py", "from unbroken import Lane", "imports go down only"),
        ("loader.py", "import unbroken", "imports go down only"),
        ("testing.py", "from .demo import rows", "imports go down only"),
        ("__init__.py", "from unbroken.cli import main", "imports go down only"),
        ("engine/pool.py", "from unbroken.streams.stage import Stage", "imports go down only"),
        ("streams/stage.py", "from ..engine import ring", "imports go down only"),
        ("engine/ring.py", "from unbroken.engine.wire import pack", "pool, inline > worker"),
        ("engine/cursor.py", "from unbroken.engine.wire import pack", "pool, inline > worker"),
        ("engine/pool.py", "from unbroken.engine import inline", "pool, inline > worker"),
        ("engine/pool.py", "from . import Pool", "the package that it lies in"),
        ("engine/extra.py", "", "engine.extra has no place in LAYERS or ENGINE_LAYERS"),
        ("streams/pack.py", "from unbroken.streams.shuffle import Shuffle", "stages do not import stages"),
        ("streams/pack.py", "def f():\n    from .shuffle import Shuffle", "stages do not import stages"),
        ("streams/pack.py", "from unbroken.streams.reading import jsonl", "stages do not import stages"),
        ("streams/stage.py", "from unbroken.streams.pack import Pack", "stages do not import stages"),
        ("streams/reading/tar.py", "from .jsonl import rows", "formats do not import formats"),
        ("audit/compare.py", "from unbroken.loader import StatefulDataLoader", "audit imports only"),
        ("extra.py", "", "extra has no place in LAYERS"),
    ],
)
def test_an_import_that_does_not_go_down_is_refused(path: str, text: str, reason: str) -> None:
    others = dict.fromkeys(["engine/inline.py", "streams/reading/jsonl.py"], "")
    (fault,) = import_faults({**others, path: text})
    assert reason in fault


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("cli.py", "import torch\nimport unbroken\nfrom unbroken import loader, testing"),
        ("__init__.py", "from unbroken.errors import LaneError\nfrom .loader import StatefulDataLoader"),
        ("audit/compare.py", "from unbroken.errors import LaneError\nfrom .subject import Subject"),
        ("loader.py", "from unbroken.engine.pool import Pool\nfrom unbroken.streams.stage import Stage"),
        ("engine/pool.py", "from .worker import main\nfrom .wire import read\nfrom unbroken.engine import ring"),
        ("streams/pack.py", "from .stage import Stage\nfrom unbroken.lanes import Lane"),
        ("streams/stage.py", "class Stage:\n    def pack(self):\n        from .pack import Pack\n        return Pack"),
        ("streams/stage.py", "if TYPE_CHECKING:\n    from .pack import Pack"),
        ("streams/reading/tar.py", "from ..stage import Stage\nfrom .paths import expand"),
        ("streams/reading/__init__.py", "from .jsonl import read_jsonl"),
    ],
)
def test_an_import_that_goes_down_is_allowed(path: str, text: str) -> None:
    others = dict.fromkeys(["engine/ring.py", "engine/wire.py", "engine/worker.py"], "")
    assert import_faults({**others, path: text}) == []


def test_peers_may_import_one_another_but_not_in_a_circle() -> None:
    one_way = {"sampling.py": "from unbroken.seeding import key", "seeding.py": ""}
    circle = {**one_way, "seeding.py": "from unbroken.lanes import Lane", "lanes.py": "import unbroken.sampling"}
    deferred = {**circle, "lanes.py": "def f():\n    import unbroken.sampling"}
    assert cycle_faults(one_way) == cycle_faults(deferred) == []
    assert import_faults(circle) == []
    assert "a cycle of imports" in cycle_faults(circle)[0]


def test_a_format_library_is_imported_in_its_own_file_only() -> None:
    text = "def f():\n    import zstandard"
    assert library_faults({"streams/reading/compressed.py": text}) == []
    assert "loader.py:2 imports zstandard" in library_faults({"loader.py": text})[0]
    assert len(library_faults({"state.py": "from pyarrow import ipc\nimport pyarrow.parquet"})) == 2


def test_an_assert_is_refused_wherever_it_stands() -> None:
    assert len(assert_faults({"state.py": "class A:\n    def f(self):\n        assert self"})) == 1


@pytest.mark.parametrize(
    "text",
    [
        "def open_pipe(): ...",
        "class TreeNode: ...",
        "class HTTPPipe: ...",
        "def f(nodes): ...",
        "canonical_path = 1",
        "class A:\n    def f(self):\n        self.pipe = 1",
        "import flavor as flavours",
        "with f() as snapshot_store: ...",
    ],
)
def test_a_name_made_of_an_unused_word_is_refused(text: str) -> None:
    assert len(word_faults({"state.py": text})) == 1


def test_names_of_others_and_longer_words_are_no_unused_words() -> None:
    text = "from multiprocessing import Pipe\nends = Pipe()\nos.pipe(flavor=1)\npipeline = snapshot = anodes = 1"
    assert word_faults({"state.py": text}) == []
    assert len(word_faults({"engine/pipe.py": ""})) == 1


def class_of(attributes: int = 0, parameters: int = 0, name: str = "A") -> str:
    given = "".join(f", p{i}" for i in range(parameters))
    body = "".join(f"        self.a{i} = {i}\n" for i in range(attributes))
    return f"class {name}:\n    def __init__(self{given}):\n{body}        pass\n"


def dataclass_of(fields: int) -> str:
    return "@dataclass(frozen=True)\nclass A:\n" + "".join(f"    a{i}: int\n" for i in range(fields))


@pytest.mark.parametrize(
    ("within", "beyond", "reason"),
    [
        ("\n" * 400, "\n" * 401, "401 lines"),
        ("def f():\n" + "    pass\n" * 59, "def f():\n" + "    pass\n" * 60, "61 lines"),
        (class_of(attributes=12), class_of(attributes=13), "13 attributes"),
        (class_of(attributes=12), class_of(attributes=12) + "    x: int\n", "13 attributes"),
        (class_of(attributes=12) + "    x: ClassVar[int]\n", class_of(attributes=14), "14 attributes"),
        (class_of(parameters=8), class_of(parameters=9), "9 constructor parameters"),
        (class_of(parameters=8), class_of(parameters=7).replace("):", ", *p, **q):"), "9 constructor parameters"),
        (dataclass_of(fields=12), dataclass_of(fields=13), "13 attributes"),
    ],
)
def test_a_budget_holds_to_its_last_unit(within: str, beyond: str, reason: str) -> None:
    assert budget_faults({"state.py": within}) == []
    (fault,) = budget_faults({"state.py": beyond})
    assert reason in fault


def test_attributes_count_wherever_and_however_they_are_set() -> None:
    text = """
class A:
    __slots__ = ("a",)
    field: int
    def first(me):
        me.a, me.b = 1, 2
        with f() as me.c:
            me.d += 1
        for me.e in ():
            other.x = me.x.y = 1
    def second(self):
        object.__setattr__(self, "f", 1)
    @staticmethod
    def third(other):
        other.x = 1
"""
    cls: Any = ast.parse(text).body[0]
    assert attributes_of(cls) == {"field", "a", "b", "c", "d", "e", "f"}


def test_the_drop_in_class_alone_may_be_as_wide_as_the_class_that_it_replaces() -> None:
    assert budget_faults({"loader.py": class_of(attributes=30, parameters=26, name=DROP_IN)}) == []
    assert len(budget_faults({"loader.py": class_of(attributes=30, parameters=26, name="Loader")})) == 2
