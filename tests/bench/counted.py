"""A daemon that counts its own calls: `python counted.py FILE gpuactors run …`, as `python -m gpuactors run …`.

SIGRTMIN begins to count. SIGRTMIN + 1 ends it and writes FILE, a JSON object: `calls` of functions of the program, in
the thread of its actors; `files` that they are in; `hops`, which are calls from one of these files to another. It needs
the standard library alone, as it runs in any checkout.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Final

BEGIN: Final = signal.SIGRTMIN
END: Final = signal.SIGRTMIN + 1


class Counted:
    """What a profiler has seen of the files below `package`."""

    def __init__(self, package: str) -> None:
        self._below = package + os.sep
        self.calls = self.hops = 0
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """As `sys.setprofile` calls it. A coroutine that goes on is a call as well."""
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(self._below):
            return
        self.calls += 1
        self.files.add(file)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(self._below):
            caller = caller.f_back
        self.hops += caller is None or caller.f_code.co_filename != file


def main() -> None:
    """Runs the module with the words after it."""
    _, file, module, *words = sys.argv
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"counted.py: {module} is no package of this checkout")
    package = spec.submodule_search_locations[0]
    counted = Counted(package)

    def begin(*_: object) -> None:
        nonlocal counted
        counted = Counted(package)
        sys.setprofile(counted)

    def end(*_: object) -> None:
        sys.setprofile(None)
        made = {"calls": counted.calls, "files": len(counted.files), "hops": counted.hops}
        Path(f"{file}.new").write_text(json.dumps(made))
        os.rename(f"{file}.new", file)

    signal.signal(BEGIN, begin)
    signal.signal(END, end)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, whose modules have names of their own
    main()
