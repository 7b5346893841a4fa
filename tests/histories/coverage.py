"""Which ordered pairs of kinds of events have occurred: what the histories have and have not tried.

Two counts: B right after A, and B anywhere after A in the same history. A pair counts for the first only if B can come
right after A at all (`kinds.can_follow`): kubelet cannot start right after it has started. Must not choose anything:
`draw.py` does.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.histories.events import Pair, Serves
from tests.histories.script import Step


@dataclass(slots=True)
class Coverage:
    """What a number of histories have covered, on nodes of one kind."""

    of: Serves = Serves.PLUGIN

    adjacent: Counter[Pair] = field(default_factory=Counter)
    """How often B came right after A."""
    ordered: Counter[Pair] = field(default_factory=Counter)
    """In how many histories B came anywhere after A."""
    histories: int = 0
    steps: int = 0

    def add(self, script: Iterable[Step]) -> None:
        """One more history was played."""
        kinds = [step.kind for step in script]
        self.histories += 1
        self.steps += len(kinds)
        self.adjacent.update(itertools.pairwise(kinds))
        self.ordered.update({(a, b) for n, a in enumerate(kinds) for b in kinds[n + 1 :]})

    @property
    def kinds(self) -> tuple[str, ...]:
        """What was drawn from."""
        return tuple(self.of.kinds)

    @property
    def pairs(self) -> frozenset[Pair]:
        """The pairs that can follow each other."""
        return self.of.pairs

    @property
    def adjacent_share(self) -> float:
        """Of the pairs that can follow each other, how many have: 0 to 1."""
        return share_of([self])

    @property
    def ordered_share(self) -> float:
        """Of all pairs of kinds, how many have occurred in this order: 0 to 1."""
        return len(self.ordered) / len(self.kinds) ** 2

    def missing(self) -> list[Pair]:
        """The pairs that can follow each other and never have, sorted."""
        return sorted(self.pairs - self.adjacent.keys())


def share_of(coverages: Sequence[Coverage]) -> float:
    """Of all pairs of these nodes that can follow each other, how many have: 0 to 1."""
    covered = sum(len(c.pairs & c.adjacent.keys()) for c in coverages)
    return covered / sum(len(c.pairs) for c in coverages)


def summary(coverage: Coverage) -> str:
    """One line for a person."""
    return (
        f"{coverage.histories} histories, {coverage.of}, {coverage.steps} steps; of {len(coverage.pairs)} ordered "
        "pairs of kinds "
        f"{100 * coverage.adjacent_share:.1f} % have followed each other directly, of {len(coverage.kinds) ** 2} "
        f"{100 * coverage.ordered_share:.1f} % have occurred in that order in one history"
    )


def table(coverage: Coverage) -> str:
    """A row for each kind: how often it came, how many kinds have come right after it, and which have not."""
    rows = [("Kind", "Times", "Followed by", "of", "Never yet followed by")]
    times = _times(coverage.adjacent)
    for name in coverage.kinds:
        possible = [b for a, b in sorted(coverage.pairs) if a == name]
        never = [b for b in possible if (name, b) not in coverage.adjacent]
        shown = "; ".join(never[:3]) + (f"; and {len(never) - 3} more" if len(never) > 3 else "")
        rows.append((name, str(times[name]), str(len(possible) - len(never)), str(len(possible)), shown))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    )


def _times(adjacent: Mapping[Pair, int]) -> Counter[str]:
    """How often each kind was followed by anything."""
    times: Counter[str] = Counter()
    for (first, _), count in adjacent.items():
        times[first] += count
    return times
