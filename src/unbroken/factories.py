"""Functions of the user's that are named on a command line: ``module:function``, or ``file.py:function``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unbroken.errors import FactoryError, UnbrokenError

__all__ = ["accepted", "call_factory", "load_factory", "name_of", "needed"]

_NOT_THE_USERS = (
    Path(__file__).parent,
    *{Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)


def load_factory(name: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``path/to/file.py:function`` names.

    Modules are looked for in the current folder too, as ``python -m`` does. A file is imported under its own name, so
    that worker processes which import it by that name find it.

    Raises ``FactoryError`` where there is none, or importing it fails; the cause is what the import raised.
    """
    where, _, function = name.rpartition(":")
    if not where or not function:
        raise FactoryError(f"{name!r} names no function. Write module:function, or path/to/file.py:function.")
    path = Path(where)
    folder = str(path.resolve().parent) if path.suffix == ".py" else str(Path.cwd())
    if path.suffix == ".py" and not path.is_file():
        raise FactoryError(f"There is no file {where}, of which {name!r} is to name a function.")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(path.stem if path.suffix == ".py" else where)
        if path.suffix == ".py" and Path(getattr(found, "__file__", None) or "").resolve() != path.resolve():
            raise FactoryError(
                f"{where} cannot be imported: there is another module {path.stem!r}, in "
                f"{getattr(found, '__file__', None) or 'Python itself'}.\nGive the file another name."
            )
        for part in function.split("."):
            found = getattr(found, part)
    except FactoryError:
        raise
    except AttributeError as error:
        raise FactoryError(f"{where} has no {function!r}: {error}.") from error
    except SystemExit as error:
        raise FactoryError(
            f"{where} ends the program when it is imported (exit code {error.code}).\n"
            'Put what it does as a program below  if __name__ == "__main__":  so that only the function is taken.'
        ) from error
    except Exception as error:
        raise FactoryError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise FactoryError(f"{name!r} is of type {type(found).__name__}, and not a function that makes a loader.")
    return found  # type: ignore[no-any-return]


def accepted(function: Callable[..., Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some keyword arguments that a function takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in, without a signature
        return {}
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(wanted)
    names = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return {name: value for name, value in wanted.items() if name in names}


def name_of(function: Callable[..., Any]) -> str:
    """The name by which another process finds a function: by its module where the path leads there, else by its file.

    Raises ``FactoryError`` where it has none.
    """
    module, name = getattr(function, "__module__", None) or "__main__", getattr(function, "__qualname__", "<none>")
    try:
        file = Path(inspect.getfile(function)).resolve()
    except (TypeError, OSError):
        file = None
    if "<" in name or file is None or file.suffix != ".py":
        raise FactoryError(
            f"Another process cannot import {function!r}: it is not a function of a module.\n"
            'Define it at the top of a file, or name it as "module:function" or "path/to/file.py:function".'
        )
    parts = Path(*module.split("."))
    roots = [Path(root).resolve() for root in sys.path if root]
    found = any(file in (root / parts.with_suffix(".py"), root / parts / "__init__.py") for root in roots)
    return f"{module if found else file}:{name}"


def needed(function: Callable[..., Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some keyword arguments that a function takes and has no default for."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    taken = accepted(function, wanted)
    return {name: value for name, value in taken.items() if name in parameters and _wanting(parameters[name])}


def _wanting(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD


def call_factory(factory: Callable[..., Any], given: Mapping[str, Any], name: str) -> Any:
    """What a factory makes, called with these arguments; ``name`` is what the error calls it.

    Raises ``FactoryError`` where it raises, with the place in the user's code, or ends the program.
    """
    try:
        return factory(**given)
    except SystemExit as error:
        raise FactoryError(f"{name} ended the program (exit code {error.code}) and made no loader.") from error
    except UnbrokenError as error:
        raise FactoryError(f"{name} made no loader: {type(error).__name__}: {error}{_raised_at(error)}") from error
    except Exception as error:
        raise FactoryError(f"{name} raised {type(error).__name__}: {error}{_raised_at(error)}") from error


def _raised_at(error: BaseException) -> str:
    """The last line of the user's own code on the way to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(Path(frame.filename).is_relative_to(of) for of in _NOT_THE_USERS)]
    return f"\nIt was raised in {own[-1].filename}, line {own[-1].lineno} ({own[-1].name})." if own else ""
