"""A node of several, as a scenario asks it: by the process in its namespaces (`agent.py`)."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, final

from tests.node.lane import Lane


class MemberError(AssertionError):
    """A node could not do what it was asked for; with its words."""


@final
class Member:
    """One of the nodes. Safe to use from several threads, which wait for each other."""

    def __init__(self, name: str, number: int, questions: IO[str], answers: IO[str]) -> None:
        self.name = name
        self.number = number
        """Its place among the nodes, from 0."""
        self._questions = questions
        self._answers = answers
        self._lock = threading.Lock()

    def ask(self, what: str, *arguments: object) -> Any:
        """Asks for a method of `Agent`: what it returns. Raises MemberError."""
        with self._lock:
            self._questions.write(json.dumps([what, arguments]) + "\n")
            self._questions.flush()
            return self.answer(what)

    def answer(self, what: str) -> Any:
        """Its next answer."""
        line = self._answers.readline()
        if not line:
            raise MemberError(f"{self.name}: {what}: its process has ended")
        found = json.loads(line)
        if "error" in found:
            raise MemberError(f"{self.name}: {what}: {found['error']}")
        return found["value"]

    @property
    def slot(self) -> int:
        """Where this node has its GPU. Who has a group open is seen by the numbers of its device node, of the whole
        machine: so no two nodes have a group in common."""
        return 0x20 + 8 * self.number


@contextmanager
def member(lane: Lane, name: str) -> Iterator[Member]:
    """The process of a node that is up; it ends with the context."""
    words = (str(lane.program), sys.executable, "-m", "tests.node.several.agent")
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Member(name, lane.worker, process.stdin, process.stdout)
        finally:
            process.stdin.close()
