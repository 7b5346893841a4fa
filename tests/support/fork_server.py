"""The program behind `forked.py`: imports what the commands import, once, then forks a process for each request.

A fork has its own arguments, environment, directory, standard files, signals and end, as a started process has. What it
has not is a start: modules are loaded already. Must have no thread when it forks.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import runpy
import socket
import sys
import termios
import time
from contextlib import suppress
from importlib import import_module
from typing import Any, Final, TextIO

REQUEST_BYTES: Final = 1 << 17
FILES: Final = 4
"""With each request: standard input, output and error, and where to write the process id and the exit code."""


def load() -> None:
    """Imports what a daemon with everything on imports, and the commands."""
    import gpuactors_simulation.run  # noqa: F401

    gc.collect()
    gc.freeze()  # a collection in a fork copies no page because of these


def serve(requests: socket.socket) -> dict[str, Any]:
    """Answers requests until the client is gone. Returns in each fork, with what was requested of it."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, REQUEST_BYTES, FILES)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        if not message:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            request: dict[str, Any] = json.loads(message)
            become(request, *_forked_and_watched(*files))
            return request
        for file in files:
            os.close(file)


def _forked_and_watched(stdin: int, stdout: int, stderr: int, said: int) -> tuple[int, int, int]:
    """Returns in a child of this process; this one says the child's process id and exit code, and ends."""
    pid = os.fork()
    if pid == 0:
        return stdin, stdout, stderr
    for file in (stdin, stdout, stderr):
        os.close(file)
    with suppress(BrokenPipeError):  # nobody wants to know
        os.write(said, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(said, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def become(request: dict[str, Any], *standard: int) -> None:
    """Makes this process what was requested, but for the program itself."""
    for number, file in enumerate(standard):
        os.dup2(file, number)
    os.closerange(len(standard), max(map(int, os.listdir("/proc/self/fd"))) + 1)
    if request["owns_terminal"]:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    sys.stdin, sys.stdout, sys.stderr = _opened(sys.stdin, 0), _opened(sys.stdout, 1), _opened(sys.stderr, 2)
    sys.argv[1:] = request["words"]
    for name, value in request["bounds"].items():
        module_name, _, bound = name.rpartition(".")
        module = import_module(f"gpuactors.{module_name}")
        getattr(module, bound)  # AttributeError for one that is no bound any more
        setattr(module, bound, value)


def _opened(like: TextIO, number: int) -> Any:
    """A standard file as the interpreter opens it at a start: `TextIO`, which the types do not know."""
    mode = "r" if number == 0 else "w"
    buffering = 1 if number == 2 or os.isatty(number) else -1
    return open(number, mode, buffering, encoding=like.encoding, errors=like.errors, closefd=False)


if __name__ == "__main__":
    load()
    serve(socket.socket(fileno=int(sys.argv.pop(1))))
    runpy.run_module("gpuactors", run_name="__main__", alter_sys=True)
