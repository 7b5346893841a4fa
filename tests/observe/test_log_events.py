"""Every event that is logged is declared, with its levels and fields, and no other one: by the calls in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from gpuactors.observe.log import LIBRARY_EVENT
from tests.observe.documented_events import EVENTS, FIELDS, TEXT, rows

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"

NAME = re.compile(r"[a-z_]+\.[a-z_]+")
"""Of an event. What else is logged is a library's text, as that of grpc_trio."""

LEVELS = ("debug", "info", "warning", "error")


@dataclass
class Logged:
    """What the source logs under one name."""

    levels: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)


class Function:
    """A function's text, in which the values of its local names are looked up."""

    def __init__(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.node = node
        self.parameters = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]

    def value(self, name: str, before: int) -> ast.expr:
        """What was last assigned to a name above a line; the default of a parameter."""
        found = [
            node
            for node in ast.walk(self.node)
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.lineno <= before
            if name in map(ast.unparse, node.targets if isinstance(node, ast.Assign) else [node.target])
        ]
        if found:
            value = max(found, key=lambda node: node.lineno).value
            assert value is not None
            return value
        keywords = zip(self.node.args.kwonlyargs, self.node.args.kw_defaults, strict=True)
        return next(default for arg, default in keywords if arg.arg == name and default is not None)

    def added(self, name: str, since: int, before: int) -> Iterator[tuple[ast.expr, frozenset[str]]]:
        """What was put into a mapping between two lines, by `name[key] = …` and `name |= {…}`; and the keywords of the
        function that must be given for that."""
        for node in ast.walk(self.node):
            match node:
                case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=of), slice=added)]) if of == name:
                    line = node.lineno
                case ast.AugAssign(target=ast.Name(id=of), value=added) if of == name:
                    line = node.lineno
                case _:
                    continue
            if since <= line <= before and not self._is_other_branch(line, before):
                yield added, self._needed(line)

    def _needed(self, line: int) -> frozenset[str]:
        """The keywords without which a line is not reached."""
        tests = [n.test for n in self._ifs() if n.body[0].lineno <= line <= (n.body[-1].end_lineno or 0)]
        named = {n.id for test in tests for n in ast.walk(test) if isinstance(n, ast.Name)}
        return frozenset(named & {arg.arg for arg in self.node.args.kwonlyargs})

    def _is_other_branch(self, line: int, before: int) -> bool:
        """Whether a line is in the first branch of an `if` in whose other one a later line is."""
        return any(
            node.body[0].lineno <= line < node.orelse[0].lineno <= before <= (node.end_lineno or 0)
            for node in self._ifs()
            if node.orelse
        )

    def _ifs(self) -> Iterator[ast.If]:
        return (node for node in ast.walk(self.node) if isinstance(node, ast.If))


@dataclass
class Keys:
    """The keys of a mapping."""

    always: set[str] = field(default_factory=set)
    sometimes: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    """Each with the keywords that must be given for it."""

    def given(self, keywords: Collection[str]) -> set[str]:
        """All that it may have where these keywords are given."""
        return self.always | {key for key, needed in self.sometimes if needed <= set(keywords)}


def keys(node: ast.expr, of: Function) -> Keys:
    """The keys of an expression that makes a mapping."""
    match node:
        case ast.Dict(keys=names, values=values):
            found = Keys()
            for name, value in zip(names, values, strict=True):
                inner = Keys({str(ast.literal_eval(name))}) if name is not None else keys(value, of)
                found.always |= inner.always
                found.sometimes += inner.sometimes
            return found
        case ast.Call(func=ast.Name(id="dict"), args=[inside]):
            return keys(inside, of)
        case ast.DictComp(generators=[ast.comprehension(iter=ast.Call(func=ast.Attribute(value=inside)))]):
            return Keys(set(), [(key, frozenset()) for key in keys(inside, of).always])
        case ast.Name(id=name):
            value = of.value(name, node.lineno)
            found = keys(value, of)
            for more, needed in of.added(name, value.lineno, node.lineno):
                new = keys(more, of).always if isinstance(more, ast.Dict) else {str(ast.literal_eval(more))}
                found.sometimes += [(key, needed) for key in sorted(new)]
            return found
    raise AssertionError(f"line {node.lineno}: the fields of {ast.unparse(node)} are not understood here")


def levels(node: ast.expr, of: Function) -> set[str]:
    if isinstance(node, ast.Name):
        return levels(of.value(node.id, node.lineno), of)
    if isinstance(node, ast.IfExp):
        return levels(node.body, of) | levels(node.orelse, of)
    assert isinstance(node, ast.Attribute), (
        f"line {node.lineno}: the level {ast.unparse(node)} is not understood"
    )
    return {node.attr.lower()}


def texts(node: ast.expr) -> list[str]:
    """The names that an expression may have."""
    if isinstance(node, ast.IfExp):
        return [*texts(node.body), *texts(node.orelse)]
    assert isinstance(node, ast.Constant), (
        f"line {node.lineno}: the name {ast.unparse(node)} is not understood"
    )
    return [str(node.value)]


def of_a_logger(call: ast.Call) -> tuple[str, str, set[str]] | None:
    """`log.info("noun.verb", key=…)`: the name, the level and the fields."""
    match call:
        case ast.Call(func=ast.Attribute(attr=level), args=[ast.Constant(value=str(name))]):
            if level in LEVELS and NAME.fullmatch(name):
                return name, level, {str(k.arg).replace("exc_info", "exception") for k in call.keywords}
    return None


def calls(function: Function, name: str, module: ast.Module) -> Iterator[ast.Call]:
    """Where a module calls one of its own functions."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function.node.name:
            assert function.parameters[0] == name
            yield node


def in_module(module: ast.Module) -> Iterator[tuple[str, set[str], set[str]]]:
    """Name, levels and fields of each line that a module logs."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and (found := of_a_logger(node)) is not None:
            yield found[0], {found[1]}, found[2]
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        function = Function(node)
        for call in ast.walk(node):
            match call:
                case ast.Call(func=ast.Name(id="Log"), args=[_, ast.Name(id=name), fields]):
                    # A function that logs under the name that it is given.
                    for caller in calls(function, name, module):
                        given = {str(k.arg): k.value for k in caller.keywords}
                        level = given.get("level", function.value("level", 0))
                        for text in texts(caller.args[0]):
                            yield text, levels(level, function), keys(fields, function).given(given)
                case ast.Call(func=ast.Name(id="Log"), args=[level, names, fields]):
                    for text in texts(names):
                        yield text, levels(level, function), keys(fields, function).given(function.parameters)


@cache
def logged() -> Mapping[str, Logged]:
    """All that the source logs."""
    found: dict[str, Logged] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for name, of, fields in in_module(ast.parse(path.read_text(encoding="utf-8"))):
            seen = found.setdefault(name, Logged())
            seen.levels |= of
            seen.fields |= fields
    found[LIBRARY_EVENT] = Logged(set(LEVELS), {"logger", "message", "exception"})
    return found


def test_every_event_that_is_logged_is_declared_and_every_one_that_is_declared_is_logged() -> None:
    assert len(logged()) > 70
    assert set(logged()) == set(EVENTS)


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_has_the_levels_and_fields_that_are_declared(name: str) -> None:
    if name not in logged():
        pytest.fail(f"{name} is declared, and logged nowhere")
    declared, seen = EVENTS[name], logged()[name]
    assert set(declared.levels) == seen.levels
    assert set(declared.fields) == seen.fields, "a field is not declared, or never logged"


def test_a_declaration_says_something_and_each_field_of_two_events_is_explained() -> None:
    uses = [field for event in EVENTS.values() for field in event.fields]
    assert {field for field in uses if uses.count(field) > 2} <= set(FIELDS)
    assert set(FIELDS) <= set(uses)
    for event in EVENTS.values():
        assert len(event.when.split()) > 3
        assert event.when.endswith(".")
        assert event.levels
        assert len(set(event.levels)) == len(event.levels)


SEEDED = """
def _line(name, *, why=None, reason="", level=Level.INFO):
    fields = {"a": 1}
    if why is not None:
        fields |= {"cause": 1, "reason": 2}
    elif reason:
        fields["reason"] = reason
    return [Log(level, name, fields)]

def granted(refused):
    fields = {"call": 1}
    if refused:
        fields |= {"status": 1}
        return Log(Level.WARNING, "call.not_granted", fields)
    else:
        return Log(Level.INFO, "call.granted", fields)

def two(same):
    _mine.warning("one.logged", wait_s=1, exc_info=error)
    log.debug("a sentence")
    level = Level.DEBUG if same else Level.ERROR
    return [Log(level, "two.logged" if same else "three.logged", {**{"x": 1}}), *_line("four.logged"),
            *_line("five.logged", reason=same, level=Level.WARNING), *_line("six.logged", why=same)]
"""


def test_the_calls_are_understood() -> None:
    assert {name: (levels, fields) for name, levels, fields in in_module(ast.parse(SEEDED))} == {
        "call.granted": ({"info"}, {"call"}),
        "call.not_granted": ({"warning"}, {"call", "status"}),
        "one.logged": ({"warning"}, {"wait_s", "exception"}),
        "two.logged": ({"debug", "error"}, {"x"}),
        "three.logged": ({"debug", "error"}, {"x"}),
        "four.logged": ({"info"}, {"a"}),
        "five.logged": ({"warning"}, {"a", "reason"}),
        "six.logged": ({"info"}, {"a", "cause", "reason"}),
    }


def test_every_row_of_the_document_is_read() -> None:
    assert len(re.findall(r"^\| `", TEXT, re.MULTILINE)) == len(EVENTS) + len(FIELDS), (
        "a row lacks a cell, or is twice"
    )
    assert list(rows("| `a.b` | info |  | It is. | Nothing. |\n| `a` | b |", 5)) == [
        ("`a.b`", "info", "", "It is.", "Nothing.")
    ]
