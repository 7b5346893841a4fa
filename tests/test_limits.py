"""`limits.py` has the bounds that belong to no single file."""

from __future__ import annotations

import ast
from collections import defaultdict

from gpuactors import limits
from tests.test_tree import ROOT


def test_a_bound_in_limits_is_shared_or_asserted_against_another() -> None:
    """Any other one stands in the file that uses it, with its unit and its reason."""
    module = ast.parse((ROOT / "src/gpuactors/limits.py").read_text(encoding="utf-8"))
    bounds = {
        node.target.id
        for node in module.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert bounds == {name for name in vars(limits) if name.isupper()}
    asserted = {
        name.id
        for node in module.body
        if isinstance(node, ast.Assert)
        for name in ast.walk(node)
        if isinstance(name, ast.Name)
    }
    users = defaultdict[str, set[str]](set)
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(value=ast.Name(id="limits"), attr=name):
                    users[name].add(str(path))
                case ast.ImportFrom(module="gpuactors.limits", names=names):
                    for alias in names:
                        users[alias.name].add(str(path))
                case _:
                    pass
    assert sorted(bound for bound in bounds - asserted if len(users[bound]) < 2) == []
