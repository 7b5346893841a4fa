"""Modules that are imported by an index are those that Python's own search finds."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from gpuactors.process import module_index

PACKAGE = "indexed_package"
NAMES = (PACKAGE, f"{PACKAGE}.part")


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Modules by Python's own search. The next import loads them anew."""
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__init__.py").write_text('"""Of a package."""\n')
    (tmp_path / PACKAGE / "part.py").write_text("def of() -> str:\n    return __name__\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return load_anew(monkeypatch)


def load_anew(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return {name: importlib.import_module(name) for name in NAMES}


def without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if one is not PathFinder])


def test_a_module_is_the_same_without_a_search(
    imported: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module_index.write(str(tmp_path / "index"))
    module_index.use(str(tmp_path / "index"))
    without_a_search(monkeypatch)
    found = load_anew(monkeypatch)
    for name, module in found.items():
        before = imported[name]
        assert module is not before
        assert (module.__file__, module.__cached__, module.__package__, module.__doc__) == (
            before.__file__,
            before.__cached__,
            before.__package__,
            before.__doc__,
        )
        assert (module.__spec__ and module.__spec__.parent) == (before.__spec__ and before.__spec__.parent)
        assert isinstance(module.__loader__, SourceFileLoader)
    assert found[PACKAGE].__path__ == list(imported[PACKAGE].__path__)
    assert found[NAMES[1]].of() == NAMES[1]


def test_a_module_without_bytecode_is_compiled(
    imported: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module_index.write(str(tmp_path / "index"))
    for module in imported.values():
        Path(module.__cached__).unlink()
    module_index.use(str(tmp_path / "index"))
    without_a_search(monkeypatch)
    assert load_anew(monkeypatch)[NAMES[1]].of() == NAMES[1]


def test_an_index_of_another_python_and_none_at_all_are_not_used(
    imported: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    module_index.write(str(index))
    index.write_text("cpython-39 30900f0\n" + index.read_text().partition("\n")[2])
    finders = [*sys.meta_path]
    module_index.use(str(index))
    module_index.use(str(tmp_path / "none"))
    assert sys.meta_path == finders
    assert imported.keys() == load_anew(monkeypatch).keys()
