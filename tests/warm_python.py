"""A `python` that begins with torch imported, for tests of programs that start other programs with `sys.executable`.

The fixture `warm_python` puts a client in its place. It asks a server, which has loaded `tests.preloaded`, to fork a
process with its arguments, environment, folder and standard streams, waits for it, passes signals on, and ends as it
does. Options of Python but `-c`, `-m` and `-u`, and variables that Python reads when it begins, start a real one. Tests
without the fixture start a real one too: they are those of how a process begins or ends.

The processes of pytest-xdist are forked from a second server (`with_frameworks`), which has also imported what test
files import; so are ranks that train with frameworks. All share both servers: each would import all of it again.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import functools
import importlib
import json
import multiprocessing
import multiprocessing.util
import os
import runpy
import shutil
import socket
import stat
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from tests import forked as forks
from tests.forked import become, forked

# Most of what test files import that takes seconds. Not pytest's plugins, which it imports in its own way.
_FRAMEWORKS = (
    "accelerate",
    "lightning.pytorch",
    "pandas",
    "sklearn.datasets",
    "torch._inductor.compile_fx",
    "transformers.trainer",
)

_CLIENT = """#!{python} -SE
import array, json, os, signal, socket, sys
words = sys.argv[1:]
while words[:1] == ["-u"]:
    words = words[1:]
read = ("PYTHONPATH", "PYTHONWARNINGS", "PYTHONHASHSEED", "PYTHONIOENCODING", "OMP_NUM_THREADS")
kept = {kept!r}
is_plain = words and (words[0] in ("-c", "-m") or not words[0].startswith("-"))
if not is_plain or any(os.environ.get(name, "") != kept.get(name, "") for name in read):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
def is_passed_on(descriptor):
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False
descriptors = [0, 1, 2, *(number for number in map(int, os.listdir("/dev/fd")) if number > 2 and is_passed_on(number))]
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
asked = json.dumps([words, os.getcwd(), dict(os.environ), {executable!r}, descriptors]).encode()
server.sendmsg([b"%10d" % len(asked)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
server.sendall(asked)
answers = server.makefile()
pid = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(answers.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
_MOST_DESCRIPTORS = 32


def serve(address: str, modules: Sequence[str] = (), clients: Sequence[str] = ()) -> None:
    """Fork a process for each connection, until the tests' process ends, which may be without a word.

    Args:
        address: The path of the socket.
        modules: What the processes have imported; those that are not installed are left out.
        clients: Those of the tests' process, which the processes then use instead of servers of their own.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    if clients:
        _inherited.extend(clients)
        forks.server_python = clients[1]
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    while parent.sentinel not in wait([listening, parent.sentinel]):
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _wait_for_one(connection)
        connection.close()
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _wait_for_one(connection: socket.socket) -> None:
    size, [(_, _, sent)], _, _ = connection.recvmsg(10, socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS))
    received = array.array("i", sent).tolist()
    words, folder, environment, executable, numbers = json.loads(connection.recv(int(size), socket.MSG_WAITALL))
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become_descriptors(received, numbers)
        _be(words, folder, environment, executable)
    for descriptor in received:
        os.close(descriptor)
    connection.sendall(f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # a test has killed the process that asked
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


def _become_descriptors(received: list[int], numbers: list[int]) -> None:
    """Give descriptors their numbers, of which others may have some now."""
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(*received, *numbers) + 1) for descriptor in received]
    for descriptor, copy, number in zip(received, above, numbers, strict=True):
        os.close(descriptor)
        os.dup2(copy, number)
        os.close(copy)


def _be(words: list[str], folder: str, environment: dict[str, str], executable: str) -> None:
    """Be a process that has just begun."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    sys.executable = executable
    multiprocessing.set_executable(executable)  # which `spawn` starts
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]  # else that of this process, forkserver
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    code = 1
    try:
        try:
            become(lambda: _run(words), words[1:] if words[0] == "-m" else words)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        multiprocessing.util._exit_function()  # waits for children, removes semaphores
    finally:
        os._exit(code)


def _run(words: list[str]) -> None:
    if words[0] == "-c":
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    elif words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


_inherited: list[str] = []  # in a process that `with_frameworks` has started, what `clients` and it have returned


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return Path(folder)


def _client(name: str, address: Path, executable: str | None = None) -> str:
    """Write a program that is `python` forked from a server, and there `sys.executable` (None: the program itself)."""
    client = _folder() / name
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "OMP"))}
    claimed = executable or str(client)
    client.write_text(_CLIENT.format(python=sys.executable, kept=kept, address=str(address), executable=claimed))
    client.chmod(client.stat().st_mode | stat.S_IXUSR)
    return str(client)


def _start_server(address: Path, *settings: object) -> None:
    process = forked(serve, str(address), *settings, daemon=True)
    while not address.exists():
        process.join(0.01)
        assert process.exitcode is None


@functools.cache
def clients() -> tuple[str, str]:
    """Return two clients of a server that ends with this process: `sys.executable` is the first, or the real Python."""
    if _inherited:
        return _inherited[0], _inherited[1]
    address = _folder() / "socket"
    found = _client("python", address), _client("real_python", address, sys.executable)
    _start_server(address)
    return found


def executable() -> str:
    """Return the path of a Python that has loaded torch, as have those that it starts with `sys.executable`."""
    return clients()[0]


@functools.cache
def with_frameworks() -> str:
    """Return the path of a Python that has imported Lightning and others; what it starts has no servers of its own."""
    if _inherited:
        return _inherited[2]
    address = _folder() / "socket_of_frameworks"
    found = _client("python_with_frameworks", address, sys.executable)
    _start_server(address, _FRAMEWORKS, (*clients(), found))
    return found


@pytest.fixture
def warm_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `sys.executable` be a Python that has loaded torch."""
    monkeypatch.setattr(sys, "executable", executable())


@pytest.fixture(scope="module")
def warm_python_in_module() -> Iterator[None]:
    """The same for all tests of a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", executable())
        yield
