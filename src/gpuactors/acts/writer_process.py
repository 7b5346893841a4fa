"""The process that writes to sysfs: one write at a time, by orders on its standard input, until that is closed.

A program of its own, started by `writes.py` as `python -I -S writer_process.py`. A write that hangs in the kernel hangs
this process and no other one; it has the lock file of its IOMMU group open as long as it lives, so no other writer
begins beside it, not even one of the next daemon. When its input ends (the act is over, was given up, or the daemon is
dead) it begins nothing new but its last duty: the final writes that were ordered, so that no `driver_override` is left
behind.

Each request is one line of words: `write PATH TEXT`, `read PATH` or `finally PATH TEXT`, path and text in hexadecimal.
Each answer is one line: the errno, 0 for success; behind it what was read, in hexadecimal. Must import no module of
gpuactors, and little else: it is started for every act.

While it writes or reads, its lock file says so behind its own number, for who finds the lock taken: since when, and the
words of the request. The lock file's descriptor is its argument.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

NOTE_AT = 32
"""The offset of the request under way in the lock file, in bytes; before it is the number of this process."""


def write(path: str, text: str) -> None:
    """Write to a file by one write(2). O_TRUNC as a shell's `>` has it; sysfs ignores it. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def read(path: str) -> str:
    """Read an attribute by one read(2). Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096).decode(errors="replace")
    finally:
        os.close(descriptor)


def note(lock: int | None, request: str) -> None:
    """Note the request under way in the lock file; an empty one clears the note. Errors are ignored: a full disk costs
    others only the note."""
    if lock is None:
        return
    with suppress(OSError):
        os.ftruncate(lock, NOTE_AT)
        if request:
            os.pwrite(lock, f"{int(time.time())} {request}\n".encode(), NOTE_AT)


def _serve(lock: int | None) -> None:
    duties: dict[str, str] = {}
    try:
        for line in sys.stdin.buffer:
            request = line.decode("ascii").strip()
            word, *rest = request.split(" ")
            path, text = (os.fsdecode(bytes.fromhex(part)) for part in (*rest, "")[:2])
            answer = "0"
            try:
                if word == "finally":
                    duties[path] = text
                else:
                    note(lock, request)
                if word == "write":
                    write(path, text)
                elif word == "read":
                    answer = f"0 {read(path).encode().hex()}"
            except OSError as error:
                answer = str(error.errno)
            note(lock, "")
            sys.stdout.buffer.write(answer.encode() + b"\n")
            sys.stdout.buffer.flush()
    except BrokenPipeError:  # nobody waits for the answer any more
        pass
    finally:
        for path, text in duties.items():
            note(lock, f"write {os.fsencode(path).hex()} {text.encode().hex()}")
            try:
                write(path, text)
            except OSError:
                continue


if __name__ == "__main__":
    _serve(int(sys.argv[1]) if len(sys.argv) > 1 else None)
    os._exit(0)  # without a flush of standard output, which may have no reader
