"""Which modules `gpuactors run` has imported when it has served, in each mode, against the committed lists.

A module more is time and memory of every start on every node: it is imported where its setting is on, or at its first
use. `python -m tests.process.test_modules` writes the lists again, which `git diff` then shows.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from gpuactors.core.values.domain import DRIVER as DOMAINS
from tests.process.node import H100, HEALTHY, address
from tests.process.test_domains import domains_node
from tests.support.claims import DRIVER as GPUS

MODES: Final = {
    "device plugin": ("--compute-domains=off", "--http-address=off"),
    "with HTTP endpoints": ("--compute-domains=off",),
    "with DRA": ("--compute-domains=off", "--http-address=off", "--dra=on"),
    "with DRA and domains": ("--compute-domains=on", "--http-address=off", "--dra=on"),
}
"""The first is the base, of which the others' lists have what is more."""

DRIVERS: Final[Mapping[str, tuple[str, ...]]] = defaultdict(
    tuple, {"with DRA": (GPUS,), "with DRA and domains": (GPUS, DOMAINS)}
)
"""Of claims."""

BASE: Final = next(iter(MODES))
LISTS: Final = Path(__file__).with_name("modules_of_run.txt")
PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"

AT_THE_END: Final = """
import atexit, sys
atexit.register(lambda: open({to!r}, "w").write("\\n".join(sys.modules)))
"""


def imported(mode: str) -> frozenset[str]:
    """Ours by their names, the others by the name of their package, with those of the standard library."""
    with tempfile.TemporaryDirectory() as name, domains_node(*MODES[mode]) as (node, _api, words):
        found = Path(name) / "modules"
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.daemon(*words, *MODES[mode], planted=AT_THE_END.format(to=str(found))) as daemon:
            node.wait_device_lists({H100: {address(0x23): HEALTHY}})
            for driver in DRIVERS[mode]:
                daemon.wait_event("claims.serving", driver=driver)
        return frozenset(map(_shown, found.read_text().splitlines())) - {""}


def _shown(module: str) -> str:
    package = module.partition(".")[0]
    if package == "gpuactors":
        return module
    return "" if package.startswith("_") or package in {"org", "sitecustomize", "cython_runtime"} else package


def committed() -> tuple[str, dict[str, frozenset[str]]]:
    """The version of Python of the lists, and the list of each mode."""
    version, *sections = LISTS.read_text().split("\n# ")
    lists = {
        mode: frozenset(rest.split()) for mode, _, rest in (section.partition("\n") for section in sections)
    }
    return version.split()[-1], {mode: more | lists[BASE] for mode, more in lists.items()}


@pytest.mark.parametrize("mode", MODES)
def test_run_imports_what_its_settings_need_and_nothing_else(mode: str) -> None:
    version, lists = committed()
    found, known = imported(mode), lists[mode]
    if version != PYTHON:  # another version's standard library is made up of other modules
        found, known = (names - sys.stdlib_module_names for names in (found, known))
    assert sorted(found - known) == [], "imported by `run` now; is each needed at the start, in this mode?"
    assert sorted(known - found) == [], "imported no more: run `just modules`"


def _lines() -> Iterator[str]:
    yield f"Modules of `gpuactors run` once it has served, by `just modules` with Python {PYTHON}"
    base = imported(BASE)
    yield from (f"# {BASE}", *sorted(base))
    for mode in list(MODES)[1:]:
        yield from (f"# {mode}", *sorted(imported(mode) - base))


if __name__ == "__main__":
    LISTS.write_text("\n".join(_lines()) + "\n")
