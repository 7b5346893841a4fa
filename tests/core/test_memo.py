"""Results are remembered by the value of the inputs: of two states one after the other, and of each of many inputs."""

from __future__ import annotations

from collections.abc import Mapping

from gpuactors.core.values import memo
from gpuactors.core.values.memo import memoized, memoized_each


def test_equal_inputs_have_the_very_result_that_they_had() -> None:
    calls = list[Mapping[str, int]]()

    @memoized
    def names(numbers: Mapping[str, int]) -> tuple[str, ...]:
        calls.append(numbers)
        return tuple(sorted(numbers))

    before, after = {"a": 1}, {"a": 1, "b": 2}
    first = names(before)
    assert (names(after), names(dict(before))) == (("a", "b"), ("a",))
    assert names(dict(before)) is first
    assert calls == [before, after], "that of the state before stays known beside that of the one after"


def test_results_that_were_not_asked_for_lately_are_made_again() -> None:
    calls = list[int]()

    @memoized
    def made(number: int) -> int:
        calls.append(number)
        return number

    for number in (1, 2, 3, 1):
        made(number)
    assert calls == [1, 2, 3, 1]


def test_of_many_inputs_only_those_that_differ_are_asked_for() -> None:
    calls = list[int]()

    @memoized_each
    def doubled(number: int) -> int:
        calls.append(number)
        return 2 * number

    before, after = {"a": 1, "b": 2}, {"c": 3, "b": 2, "a": 5}
    assert doubled(before) == {"a": 2, "b": 4}
    assert list(doubled(after).items()) == [("c", 6), ("b", 4), ("a", 10)], "in the order of the inputs"
    assert calls == [1, 2, 3, 5]
    doubled({})
    doubled(after)
    assert calls == [1, 2, 3, 5], "what a state without them has in between changes nothing"


def test_all_is_made_again_after_a_function_was_replaced() -> None:
    results = iter((1, 2, 3, 4))

    @memoized
    def made(_: str) -> int:
        return next(results)

    @memoized_each
    def made_each(_: str) -> int:
        return next(results)

    assert (made("a"), made_each({"a": "a"})) == (1, {"a": 2})
    memo.forget()
    assert (made("a"), made_each({"a": "a"})) == (3, {"a": 4})
