"""A file in which a write hangs: until it is answered, and no longer than there is somebody to answer."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.memory.hanging import HangingFile
from tests.process.daemon import eventually
from tests.support.patience import patient

PATIENCE_S = patient(20.0)

WRITER = """
import os, sys
descriptor = os.open(sys.argv[1], os.O_WRONLY | os.O_TRUNC)
try:
    print(os.write(descriptor, b"0000:23:00.0"))
except OSError as error:
    print(error.strerror)
"""

MAKER = """
import sys, pathlib
from tests.memory.hanging import HangingFile
with HangingFile(pathlib.Path(sys.argv[1])):
    print("made", flush=True)
    sys.stdin.read()
"""


def writer(path: Path) -> subprocess.Popen[str]:
    """A process that writes, and has the file open by now."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    eventually(lambda: has_open(process.pid, path), "the writer's open(2)", PATIENCE_S)
    return process


def said(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=PATIENCE_S)
    return said


def has_open(pid: int, path: Path) -> bool:
    found = False
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found = found or os.readlink(entry) == str(path)
    return found


def test_a_write_returns_when_it_is_answered(tmp_path: Path) -> None:
    with HangingFile(tmp_path / "unbind") as file, writer(file.path) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        assert file.answer(PATIENCE_S) == "0000:23:00.0"
        assert said(process) == "12\n"


def test_without_a_write_the_answer_is_not_waited_for_without_end(tmp_path: Path) -> None:
    with HangingFile(tmp_path / "unbind") as file, pytest.raises(TimeoutError, match="nobody has written to"):
        file.answer(0.01)


def test_a_write_fails_when_the_file_is_closed(tmp_path: Path) -> None:
    with HangingFile(tmp_path / "unbind") as file, writer(file.path) as process:
        file.close()
        assert said(process) == "Broken pipe\n"


def test_no_writer_outlives_a_test_run_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "unbind"
    with subprocess.Popen(
        [sys.executable, "-c", MAKER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "made\n"
        with writer(path) as process:
            maker.kill()
            assert said(process) == "Broken pipe\n"
