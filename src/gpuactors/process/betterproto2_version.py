"""The module `betterproto2._version`, without the installed package's metadata.

The library's own imports `importlib.metadata`, with 34 modules (14 ms of each start, 1.7 MiB), to compare its version
with that of the compiler of our generated code. pyproject.toml bounds the one by the other, and a test compares them.

A file of its own: it comes before whatever imports betterproto2.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Final

NAME: Final = "betterproto2._version"


def put_in() -> None:
    """Install what betterproto2 and generated code take from that module."""
    module: Any = ModuleType(NAME)
    module.__version__ = "0.10"
    module.check_compiler_version = _is_checked_by_a_test
    sys.modules.setdefault(NAME, module)


def _is_checked_by_a_test(compiler_version: str) -> None: ...
