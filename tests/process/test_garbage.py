"""A short piece of `just garbage`: the daemon lives, kubelet is answered, and nothing stays open."""

from __future__ import annotations

import pytest

from tests.process.garbage import judged, play


@pytest.mark.parametrize("seed", [1, 2])
def test_garbage_beside_kubelets_calls(seed: int) -> None:
    seen = play(calls=400, seed=seed, seconds=300.0)
    assert judged(seen, 400) == []
    assert seen.descriptors[1] <= seen.descriptors[0]
