"""The process that writes to sysfs: one write at a time, as it is told on its standard input, until that is closed.

A program of its own, started by `writes.py` as `python -I -S writer_process.py`. A write that hangs in the kernel
hangs this process and no other one; it has the lock file of its IOMMU group open as long as it lives, so no other
writer begins beside it, not even one of the next daemon. When its input ends (the act is over, was given up, or the
daemon is dead) it begins nothing new but its last duty: what it was told to write at the end, so that no
`driver_override` is left behind.

Each request is one line of words: `write PATH TEXT`, `read PATH` or `finally PATH TEXT`, path and text in hexadecimal.
Each answer is one line: the errno, 0 for success; behind it what was read, in hexadecimal. Must import nothing of ours,
and little else: it is started for every act.
"""

from __future__ import annotations

import os
import sys


def write(path: str, text: str) -> None:
    """One write(2). O_TRUNC as a shell's `>` has it; sysfs ignores it. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def read(path: str) -> str:
    """One read(2) of an attribute. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096).decode(errors="replace")
    finally:
        os.close(descriptor)


def _serve() -> None:
    duties: dict[str, str] = {}
    try:
        for line in sys.stdin.buffer:
            word, *rest = line.decode("ascii").split(" ")
            path, text = (os.fsdecode(bytes.fromhex(part)) for part in (*rest, "")[:2])
            answer = "0"
            try:
                if word == "write":
                    write(path, text)
                elif word == "read":
                    answer = f"0 {read(path).encode().hex()}"
                else:
                    duties[path] = text
            except OSError as error:
                answer = str(error.errno)
            sys.stdout.buffer.write(answer.encode() + b"\n")
            sys.stdout.buffer.flush()
    except BrokenPipeError:  # nobody waits for the answer any more
        pass
    finally:
        for path, text in duties.items():
            try:
                write(path, text)
            except OSError:
                continue


if __name__ == "__main__":
    _serve()
    os._exit(0)  # without a flush of standard output, which may have no reader
