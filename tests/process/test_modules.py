"""Which modules `gpuactors run` has imported when it has served, in each mode, and which the commands that people type
have, against the committed lists.

A module more is time and memory of every start on every node: it is imported where its setting is on, or at its first
use. A command takes as long as its imports. `python -m tests.process.test_modules` writes the lists again, which `git
diff` then shows.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from gpuactors.core.values.domain import DRIVER as DOMAINS
from tests.process.daemon import clean_environment
from tests.process.node import H100, HEALTHY, address, open_node
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
LISTS_OF_COMMANDS: Final = Path(__file__).with_name("modules_of_commands.txt")
PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"

COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "gpuactors --help": ("--help",),
    "gpuactors inspect": ("inspect",),
    "gpuactors explain ADDRESS": ("explain", address(0x23)),
}

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


def imported_by_commands() -> Mapping[str, frozenset[str]]:
    """The same for each of COMMANDS, beside a daemon that runs."""
    found = {}
    with tempfile.TemporaryDirectory() as name, open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.daemon():
            node.wait_device_lists({H100: {address(0x23): HEALTHY}})
            for command, (first, *rest) in COMMANDS.items():
                to = Path(name) / "modules"
                program = f"{AT_THE_END.format(to=str(to))}\nfrom gpuactors.__main__ import main\nmain()\n"
                paths = () if first == "--help" else (f"--state-dir={node.directory / 's'}",)
                words = (sys.executable, "-c", program, first, *paths, *rest)
                done = subprocess.run(
                    words, env=clean_environment(), capture_output=True, text=True, check=True
                )
                assert first == "--help" or "running daemon" in done.stdout
                found[command] = frozenset(map(_shown, to.read_text().splitlines())) - {""}
    return found


def _shown(module: str) -> str:
    package = module.partition(".")[0]
    if package == "gpuactors":
        return module
    return "" if package.startswith("_") or package in {"org", "sitecustomize", "cython_runtime"} else package


def committed(file: Path) -> tuple[str, dict[str, frozenset[str]]]:
    """The version of Python of the lists, and the list of each mode or command."""
    version, *sections = file.read_text().split("\n# ")
    lists = {
        mode: frozenset(rest.split()) for mode, _, rest in (section.partition("\n") for section in sections)
    }
    base = lists.get(BASE, frozenset())
    return version.split()[-1], {name: more | base for name, more in lists.items()}


@pytest.mark.parametrize("mode", MODES)
def test_run_imports_what_its_settings_need_and_nothing_else(mode: str) -> None:
    _compare(imported(mode), LISTS, mode)


def test_commands_import_what_they_need_and_nothing_else() -> None:
    for command, found in imported_by_commands().items():
        _compare(found, LISTS_OF_COMMANDS, command)


def _compare(found: frozenset[str], file: Path, name: str) -> None:
    version, lists = committed(file)
    known = lists[name]
    if version != PYTHON:  # another version's standard library is made up of other modules
        found, known = (names - sys.stdlib_module_names for names in (found, known))
    assert sorted(found - known) == [], f"imported by {name} now; is each needed?"
    assert sorted(known - found) == [], f"imported by {name} no more: run `just modules`"


def _lines(what: str, lists: Mapping[str, frozenset[str]]) -> Iterator[str]:
    yield f"Modules of {what}, by `just modules` with Python {PYTHON}"
    for name, modules in lists.items():
        base = lists.get(BASE, frozenset()) if name != BASE else frozenset()
        yield from (f"# {name}", *sorted(modules - base))


if __name__ == "__main__":
    of_run = {mode: imported(mode) for mode in MODES}
    LISTS.write_text("\n".join(_lines("`gpuactors run` once it has served", of_run)) + "\n")
    of_commands = imported_by_commands()
    LISTS_OF_COMMANDS.write_text("\n".join(_lines("commands, once they have ended", of_commands)) + "\n")
