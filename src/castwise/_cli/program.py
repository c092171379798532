"""The script that `castwise run` is to run. Nothing here needs torch, so a wrong name is answered at once."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import sys
import types
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path

from castwise._user_error import UserError

# Modules that import nothing of the user's and start no processes, and names by which code could.
_KNOWN = {
    *("__future__", "abc", "argparse", "collections", "contextlib", "csv", "dataclasses", "datetime", "enum"),
    *("functools", "glob", "hashlib", "io", "itertools", "json", "logging", "math", "os", "pathlib", "random", "re"),
    *("shutil", "statistics", "string", "sys", "textwrap", "time", "typing"),
}
# A forked process would print the end of the run a second time.
_REACHING = {"__builtins__", "__dict__", "__import__", "__loader__", "__spec__", "fork", "forkpty", "modules"}
_NAMES_REACHING = _REACHING | {"compile", "eval", "exec", "getattr", "globals", "locals", "vars"}

_PYTHON = re.compile(r"python[\d.]*(\.exe)?")
_PYTHONS_WITH_VALUE = {"-W", "-X", "--check-hash-based-pycs"}
_PYTHONS_LETTERS = tuple("bBdEiIOPqRsStuvWxX")
_AS_MODULE = "-m castwise run"
LAUNCHERS = {
    **dict.fromkeys(("accelerate", "accelerate-launch", "torchrun"), _AS_MODULE),
    "deepspeed": "--module castwise run",
    **dict.fromkeys(("mpiexec", "mpirun", "srun"), f"python {_AS_MODULE}"),
}
"""What follows the options of a launcher, which would otherwise start processes without castwise."""
LAUNCHING_MODULES = {"accelerate.commands.launch", "torch.distributed.launch", "torch.distributed.run"}


class Program:
    """A script and its arguments.

    Args:
        name: A file, or the name of a module.
        arguments: The script's arguments.
        is_module: Whether `name` is a module.

    Raises:
        UserError: There is no such file or module, or the file is not a Python script.
    """

    def __init__(self, name: str, arguments: list[str], *, is_module: bool) -> None:
        self.name, self.arguments, self.is_module = name, arguments, is_module
        if is_module:
            if name in LAUNCHING_MODULES:
                raise UserError(_started_by(f"python -m {name}", arguments))
            _check_module(name)
            return
        path = Path(name)
        if arguments and _PYTHON.fullmatch(path.name):
            raise UserError(_without_python(name, arguments))
        if path.name in LAUNCHERS:
            raise UserError(_started_by(name, arguments))
        try:
            if path.is_dir() and (path / "__main__.py").is_file():
                path = path / "__main__.py"
            self._path = path.absolute()  # as tracebacks show it without castwise
            self._source = path.read_bytes()
            self._code = compile(self._source, str(self._path), "exec", dont_inherit=True)
        except OSError as error:
            raise UserError(_unreadable(path, error.strerror)) from None
        except (SyntaxError, ValueError) as error:
            raise UserError(f"{path} is not a Python script: {error}") from None

    def cannot_import_torch(self) -> bool:
        """Return True for a script that runs the same without torch, as far as its text tells."""
        try:
            return not self.is_module and cannot_import_torch(self._source, self._path.parent)
        except (MemoryError, OSError, RecursionError):  # a folder that cannot be listed, a tree that is too deep
            return False

    def execute(self) -> None:
        """Run the script as Python itself would."""
        sys.argv = [self.name, *self.arguments]
        if self.is_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            return
        sys.path[0] = str(self._path.parent)
        main = types.ModuleType("__main__")
        loader = SourceFileLoader("__main__", str(self._path))
        main.__dict__.update(
            __file__=str(self._path), __builtins__=__builtins__, __cached__=None, __loader__=loader, __annotations__={}
        )
        sys.modules["__main__"] = main
        exec(self._code, main.__dict__)


def check_is_none_of_pythons(option: str) -> None:
    """Raise a UserError for an option of Python's that was given to castwise."""
    if option == "-c":
        raise UserError(_SAVE_CODE.format(option))
    if option[1:2] in _PYTHONS_LETTERS:
        with_value = f"{option} ..." if option in _PYTHONS_WITH_VALUE else option
        raise UserError(f"{option} is an option of Python's: python {with_value} -m castwise run SCRIPT")


_SAVE_CODE = "castwise runs scripts and modules: save the code of {} as a script"


def _without_python(python: str, arguments: list[str]) -> str:
    """Return what to run instead of `python [options] SCRIPT`."""
    first = 0
    while first < len(arguments) and arguments[first].startswith("-") and arguments[first] not in ("-c", "-m", "-"):
        first += 2 if arguments[first] in _PYTHONS_WITH_VALUE else 1
    if arguments[first : first + 1] == ["-c"]:
        return _SAVE_CODE.format(f"{python} -c")
    options, rest = shlex.join(arguments[:first]), shlex.join(arguments[first:])
    keep = f"; with its options: {python} {options} -m castwise run {rest}" if options not in ("", "-u") else ""
    return f"leave out {python}, because castwise runs the script itself: castwise run {rest}{keep}"


def _started_by(launcher: str, arguments: list[str]) -> str:
    """Return how a launcher starts castwise in each process."""
    name = Path(launcher).name
    scripts = (place for place, given in enumerate(arguments) if given.endswith(".py") or given in ("-m", "--module"))
    first = next(scripts, None)
    run = LAUNCHERS.get(name, _AS_MODULE)
    if first is None:
        options, script = [*(["launch"] if name == "accelerate" else []), f"[options of {name}]"], "SCRIPT"
    else:
        options = [shlex.quote(given) for given in arguments[:first] if not _PYTHON.fullmatch(Path(given).name)]
        script = shlex.join(["-m" if given == "--module" else given for given in arguments[first:]])
    return f"let {name} start castwise in each process: {' '.join([launcher, *options, run, script])}"


def _unreadable(path: Path, why: str | None) -> str:
    return f"cannot read {path}: {why}; give the path of a script, or -m and the name of a module"


def _check_module(name: str) -> None:
    """Raise UserError if there is no such package; looking inside it would already run it."""
    package, before = name.partition(".")[0], sys.path[0]
    sys.path[0] = os.getcwd()
    try:
        spec = find_spec(package)
    except (ImportError, ValueError, OSError):
        spec = None
    finally:
        sys.path[0] = before
    if spec is None:
        raise UserError(
            f"there is no module {package!r}: check its name; it must be installed or in the current folder"
        )


def cannot_import_torch(source: bytes, folder: Path) -> bool:
    """Return True if a script imports only known modules of the standard library, and can import no other.

    Args:
        source: The text of the script.
        folder: The folder of the script, whose modules would shadow those of the standard library.
    """
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    if names & _NAMES_REACHING or attributes & _REACHING:
        return False
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += ["." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {module.partition(".")[0] for module in modules}
    shadowing = {path.name.partition(".")[0] for path in folder.iterdir()} if imported else set()
    return imported <= _KNOWN - shadowing
