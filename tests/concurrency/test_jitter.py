"""Waits with a random share: how far they lie apart."""

from __future__ import annotations

from gpuactors.concurrency.jitter import about, shorter


def test_a_wait_is_shorter_by_its_share_at_most() -> None:
    waits = [shorter(10.0, 0.3) for _ in range(1000)]
    assert all(7.0 <= wait_s <= 10.0 for wait_s in waits)
    assert max(waits) - min(waits) > 2.5, "they lie all over the share"


def test_a_wait_is_longer_or_shorter_by_its_share_at_most() -> None:
    waits = [about(10.0, 0.3) for _ in range(1000)]
    assert all(7.0 <= wait_s <= 13.0 for wait_s in waits)
    assert max(waits) - min(waits) > 5.0, "they lie all over the share"


def test_without_a_share_it_is_as_given() -> None:
    assert (shorter(10.0, 0.0), about(10.0, 0.0)) == (10.0, 10.0)
