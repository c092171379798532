"""A `python` that begins with torch imported, for tests of programs that start other programs with `sys.executable`.

The fixture `warm_python` puts a client in its place. It asks a server, which has loaded `tests.preloaded`, to fork a
process with its arguments, environment, folder and standard streams, waits for it, passes signals on, and ends as it
does. Options of Python but `-c`, `-m` and `-u`, and variables that Python reads when it begins, start a real one. Tests
without the fixture start a real one too: they are those of how a process begins or ends.
"""

from __future__ import annotations

import array
import atexit
import functools
import json
import multiprocessing
import os
import runpy
import shutil
import socket
import stat
import sys
import tempfile
import types
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from tests.forked import become, forked

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
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
asked = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
server.sendmsg([b"%10d" % len(asked)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
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


def serve(address: str, executable: str) -> None:
    """Fork a process for each connection, until the tests' process ends, which may be without a word."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    while parent.sentinel not in wait([listening, parent.sentinel]):
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _wait_for_one(connection, executable)
        connection.close()
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _wait_for_one(connection: socket.socket, executable: str) -> None:
    size, [(_, _, sent)], _, _ = connection.recvmsg(10, socket.CMSG_SPACE(12))
    streams = array.array("i", sent).tolist()
    words, folder, environment = json.loads(connection.recv(int(size), socket.MSG_WAITALL))
    pid = os.fork()
    if pid == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _be(words, folder, environment, executable)
    for stream in streams:
        os.close(stream)
    connection.sendall(f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    connection.sendall(f"{code}\n".encode())
    os._exit(0)


def _be(words: list[str], folder: str, environment: dict[str, str], executable: str) -> None:
    """Be a process that has just begun."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    sys.executable = executable
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


@functools.cache
def executable() -> str:
    """Return the path of the client; the server ends with this process."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    address, client = str(Path(folder, "socket")), Path(folder, "python")
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "OMP"))}
    client.write_text(_CLIENT.format(python=sys.executable, kept=kept, address=address))
    client.chmod(client.stat().st_mode | stat.S_IXUSR)
    process = forked(serve, address, str(client), daemon=True)
    while not os.path.exists(address):
        process.join(0.01)
        assert process.exitcode is None
    return str(client)


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
