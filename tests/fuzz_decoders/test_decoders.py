"""Some thousand damaged inputs: a decoder answers, or raises its own error."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz_decoders.decoders import decoders
from tests.fuzz_decoders.run import run

INPUTS, SEED = 6_000, 24


def test_no_damaged_input_raises_anything_but_the_decoders_own_error(tmp_path: Path) -> None:
    (tmp_path / "played").mkdir()
    counts, broken = run(tmp_path / "played", INPUTS, SEED)
    assert not broken, "\n".join(map(str, broken))
    (tmp_path / "named").mkdir()
    assert counts.keys() == {one.name for one in decoders(tmp_path / "named")}, "each decoder has had some"
