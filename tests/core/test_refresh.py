"""What is asked for by number: whoever asks gets an answer that was asked for later."""

from __future__ import annotations

import math

from gpuactors.core.requests import Refresh


def test_what_is_asked_for_is_outstanding_by_its_number_and_not_due() -> None:
    assert Refresh(due_at=5.0).asked(7) == Refresh(outstanding=7, again=False, due_at=math.inf)


def test_what_is_asked_for_while_one_is_outstanding_is_wanted_after_that() -> None:
    once = Refresh().asked(7)
    assert once.asked(8) == once.asked(8).asked(9) == Refresh(outstanding=7, again=True)


def test_what_was_due_while_one_is_outstanding_is_part_of_what_is_asked_for() -> None:
    waiting = Refresh().asked(7).due_by(5.0)
    assert (waiting.due_at, waiting.deadline) == (5.0, math.inf)
    assert waiting.asked(8).due_at == math.inf


def test_an_answer_leaves_nothing_outstanding_and_says_when_the_next_one_is_due() -> None:
    answered = Refresh().asked(7).asked(8).answered(9.0)
    assert answered == Refresh(due_at=9.0)
    assert answered.deadline == 9.0


def test_it_is_due_at_the_earliest_time_that_anybody_named() -> None:
    assert Refresh().due_by(3.0).due_by(5.0).due_by(4.0).due_at == 3.0
