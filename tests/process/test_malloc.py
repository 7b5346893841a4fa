"""Memory that a large message took is given back, also what a thread took; what a start made is collected no more."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpuactors.process import malloc
from tests.support.patience import patient

WORK = """
import sys, threading
from gpuactors.process import malloc

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def take():
    block = bytearray(16 << 20)
    del block
    blocks = [bytearray(b"x" * (1 << 20)) for _ in range(16)]
    del blocks

if sys.argv[1] == "given back":
    assert malloc.give_back()
before = resident()
for _ in range(4):
    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(resident() - before)
"""

KEPT_AT_MOST = 8 << 20
"""What the interpreter itself may keep, in bytes: far below the 64 MiB that the threads hold together."""


@pytest.mark.skipif(not malloc.give_back(), reason="this C library has no mallopt")
@pytest.mark.parametrize("how", ["given back", "as it is"])
def test_what_threads_took_is_given_back(how: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WORK, how], capture_output=True, text=True, timeout=patient(60.0), check=True
    )
    assert (int(ran.stdout) < KEPT_AT_MOST) == (how == "given back"), f"{ran.stdout.strip()} bytes kept"


COUNTED = """
import gc
import gpuactors.daemon.app, gpuactors.cli.commands
from gpuactors.process import malloc

malloc.keep_the_start()
print(len(gc.get_objects()))
"""


def test_a_full_collection_does_not_visit_what_the_start_has_made() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", COUNTED],
        capture_output=True,
        text=True,
        timeout=patient(60.0),
        check=True,
    )
    assert int(ran.stdout) < 1000, "of 50,000"
