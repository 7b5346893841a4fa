"""What betterproto2 is given in place of its module of its version, against that module."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import betterproto2
import pytest
from betterproto2 import _version as theirs

import gpuactors
from gpuactors.process import betterproto2_version


def test_it_has_all_that_betterproto2_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, betterproto2_version.NAME)
    betterproto2_version.put_in()
    ours = sys.modules[betterproto2_version.NAME]
    taken = {name for name in vars(theirs) if getattr(betterproto2, name, None) is getattr(theirs, name)}
    assert {"__version__", "check_compiler_version"} <= taken - {"__builtins__"} <= vars(ours).keys()
    assert metadata.version("betterproto2").startswith(f"{ours.__version__}.")


def test_the_library_is_of_the_version_of_the_generated_code() -> None:
    """As their module checks it at each import."""
    package = Path(next(iter(gpuactors.__path__)))
    texts = [path.read_text(encoding="utf-8") for path in package.glob("*/pb/**/__init__.py")]
    versions = [found for text in texts for found in re.findall(r'^_COMPILER_VERSION = "(.*)"$', text, re.M)]
    assert len(versions) >= 6
    for version in versions:
        theirs.check_compiler_version(version)
