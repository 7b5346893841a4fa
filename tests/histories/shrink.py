"""Makes a failing history as short as it can be, while the same check fails.

Delta debugging: steps are dropped, in large pieces first, then waits become 0 and slots small. Every attempt is played,
so this takes some hundred histories at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from tests.histories.kinds import card_of
from tests.histories.play import Played, play
from tests.histories.script import Script

ATTEMPTS_MAX: Final = 400

Play = Callable[[Script, int], Played]


def shrink(failed: Played, *, attempts: int = ATTEMPTS_MAX, play_one: Play = play) -> Played:
    """The shortest history found that fails the same check under the same seed. Returns `failed` itself, played as a
    script, if nothing can be left out; raises `ValueError` if it did not fail."""
    if failed.failure is None:
        raise ValueError("only a history that failed can be made shorter")
    check, best, left = failed.failure.check, failed, attempts
    improved = True
    while improved and left > 0:
        improved = False
        for candidate in _smaller(best.script):
            if left == 0:
                break
            left -= 1
            played = play_one(candidate, failed.seed)
            same = played.failure is not None and played.failure.check == check
            if same and _size(played.script) < _size(best.script):
                best, improved = played, True
                break
    return best


def _size(script: Script) -> tuple[int, float, int]:
    return len(script), sum(step.wait_s for step in script), sum(step.slot for step in script)


def _smaller(script: Script) -> Iterator[Script]:
    """Scripts that are a little shorter, the shortest first."""
    piece = len(script) // 2
    while piece >= 1:
        for start in range(0, len(script), piece):
            yield script[:start] + script[start + piece :]
        piece //= 2
    for number, step in enumerate(script):
        for wait_s in (0.0, 0.001, 0.3):
            if wait_s < step.wait_s:
                yield _with(script, number, wait_s=wait_s)
        for slot in (0, card_of(step.slot), step.slot // 2):
            if slot < step.slot:
                yield _with(script, number, slot=slot)


def _with(script: Script, number: int, **change: float) -> Script:
    return (*script[:number], script[number]._replace(**change), *script[number + 1 :])  # type: ignore[arg-type]
