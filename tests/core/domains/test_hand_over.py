"""A daemon that has handed over: what it knew of domains and of the label is its successor's to find out."""

from __future__ import annotations

import math

from gpuactors.core.domains import step
from gpuactors.core.events.daemon import HandOverRequested
from tests.core.domains.domain_core import DomainCore, channel, name

ONE = name("one")


def test_nothing_is_due_at_a_daemon_that_has_handed_over() -> None:
    """It looked at what a claim had waited for again and again, without a pause, until it ended: `due` does nothing
    while another daemon serves."""
    core = DomainCore(channel(ONE))
    core.prepare(ONE)
    assert "daemon" in core.problem(ONE)
    assert step.deadline(core.state) < math.inf
    core.feed(HandOverRequested())
    assert step.deadline(core.state) == math.inf
