"""Growth and leaks, by samples whose answer is known."""

from __future__ import annotations

import pytest

from tests.soak.trend import WARM_UP_S, Point, leak, processes, slope_an_hour

STEP_S = 10


def samples(process: int, values: dict[int, float] | None = None, *, begin: int = 0, for_s: int = 1800,
            each_hour: float = 0.0, base: float = 40.0) -> list[Point]:  # fmt: skip
    return [
        Point(begin + at, process, (values or {}).get(at, base + each_hour * at / 3600))
        for at in range(0, for_s, STEP_S)
    ]


def test_each_process_has_its_own_line() -> None:
    found = processes(
        [*samples(1, for_s=30), *samples(2, begin=30, for_s=20), *samples(1, begin=50, for_s=10)]
    )
    assert [(len(mine), mine[0].process) for mine in found] == [(3, 1), (2, 2), (1, 1)]
    assert processes([]) == []


@pytest.mark.parametrize("each_hour", [0.0, 6.0, -2.5])
def test_the_slope_is_that_of_the_line(each_hour: float) -> None:
    assert slope_an_hour(samples(1, each_hour=each_hour)) == pytest.approx(each_hour)


def test_another_process_begins_anew_without_a_slope() -> None:
    """The second one has 30 more from its beginning, and neither grows."""
    assert slope_an_hour([*samples(1), *samples(2, begin=1800, base=70.0)]) == pytest.approx(0.0)


def test_a_warm_up_is_no_growth() -> None:
    rising = {at: float(at) for at in range(0, int(WARM_UP_S), STEP_S)}
    assert slope_an_hour(samples(1, rising)) == pytest.approx(0.0)
    assert slope_an_hour(samples(1, for_s=int(WARM_UP_S))) is None
    assert slope_an_hour([]) is None


def test_descriptors_that_grow_leak() -> None:
    said = leak(samples(7, each_hour=60.0))
    assert said is not None
    assert "process 7" in said


def test_work_is_no_leak() -> None:
    busy = dict.fromkeys(range(1200, 1800, 30), 90.0)
    assert leak(samples(7, busy)) is None
    assert leak(samples(7, each_hour=3.0)) is None
    assert leak(samples(7, each_hour=600.0, for_s=300)) is None, "too short to tell"
