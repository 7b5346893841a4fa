"""The runner. An input that breaks a decoder is kept small, and printed as a line that a test can have."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fuzz_decoders.decoder import Decoder, sentence
from tests.fuzz_decoders.decoders import decoders

_BYTES_MAX: Final = 1 << 20
"""Of an input: what is larger is refused where it is read, by each reader's own bound."""

_SLOW_S: Final = 2.0
"""An input of some kilobytes that takes longer is a way to stop the daemon. On a busy machine far from a plain one."""


@dataclass(frozen=True, slots=True)
class Broken:
    """What a decoder did that it must not."""

    decoder: str
    content: bytes
    what: str

    def __str__(self) -> str:
        return f"{self.decoder}: {self.what}\n  {self.content[:600]!r} ({len(self.content):,} bytes)"


def run(
    directory: Path, inputs: int, seed: int, *, say: Callable[[str], None] = lambda _: None
) -> tuple[Counter[str], list[Broken]]:
    """How many inputs each decoder has had, and what broke, each kind of failure once. `directory`: for files."""
    draw, all_of_them = random.Random(seed), decoders(directory)
    weights = [one.weight for one in all_of_them]
    counts: Counter[str] = Counter()
    broken: dict[tuple[str, str], Broken] = {}
    for one in all_of_them:
        _check_real(one)
    began = time.monotonic()
    for number in range(inputs):
        (one,) = draw.choices(all_of_them, weights)
        content = one.damage(draw, draw.choice(one.inputs))[:_BYTES_MAX]
        counts[one.name] += 1
        if (found := _tried(one, content)) is not None and (one.name, found.what[:40]) not in broken:
            broken[one.name, found.what[:40]] = found
            say(str(found))
        if number and number % 50_000 == 0:
            say(f"{number:,} inputs in {time.monotonic() - began:.0f} s, {len(broken)} failures")
    return counts, [*broken.values()]


def _check_real(decoder: Decoder) -> None:
    """A real input is decoded, the first at least: else the damaged ones would test nothing. Raises its error."""
    first, *others = decoder.inputs
    decoder.decode(first)
    for content in others:
        with suppress(*decoder.errors):
            decoder.decode(content)


def _tried(decoder: Decoder, content: bytes) -> Broken | None:
    began = time.process_time()
    try:
        decoder.decode(content)
    except decoder.errors as error:
        try:
            sentence(error)
        except (AssertionError, UnicodeEncodeError) as bad:
            return Broken(decoder.name, content, f"{type(error).__name__}: {bad}")
    except Exception as error:
        return Broken(decoder.name, content, f"{type(error).__name__}: {str(error)[:300]}")
    if (took_s := time.process_time() - began) > _SLOW_S:
        return Broken(decoder.name, content, f"it took {took_s:.1f} s")
    return None
