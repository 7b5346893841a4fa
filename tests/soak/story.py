"""What a soak has done and seen: its events, pods and refusals, as a page of Markdown. Pure but for the files."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.soak.picture import Mark, Points, chart
from tests.soak.sample import Sample
from tests.soak.tenants import Tenant, without_names
from tests.soak.trend import WARM_UP_S, Point, leak, processes, slope_an_hour

BEFORE: Final = 40
"""Events before a failure that its story tells."""

MARKED: Final = {
    "update the daemon": True, "kill the daemon": True,
    "restart kubelet": False, "kubelet away": False, "API server away": False,
}  # fmt: skip
"""Kinds of events that are drawn into the pictures, and whether with their name: of the others there are many."""

MOST_KINDS: Final = 7
"""Of requests in a picture; the others are together."""

MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Played:
    """An event, and what came of it."""

    at_s: float
    """Since the soak began."""
    round: int
    kind: str
    words: str
    did: str
    """Empty: there was nothing to do."""

    def __str__(self) -> str:
        return f"{self.at_s:8.1f} s  round {self.round:4}  {self.words}: {self.did or 'nothing to do'}"


@dataclass(slots=True)
class Story:
    """All of one soak."""

    seed: int
    what: str
    """Versions and node, in words."""
    played: list[Played] = field(default_factory=list)
    rounds: int = 0
    lasted_s: float = 0.0
    tenants: Sequence[Tenant] = ()
    samples: Sequence[Sample] = ()
    refused_prepares: Mapping[str, int] = field(default_factory=dict)
    """How often kubelet has reported a refused prepare, by its words."""
    failure: str = ""

    def verdict(self) -> list[str]:
        """What is wrong, as sentences."""
        leaked = leak(points(self.samples, "descriptors"))
        return [words for words in (self.failure, leaked) if words]

    def led_there(self) -> str:
        """The last events."""
        return "\n".join(str(one) for one in self.played[-BEFORE:])


def points(samples: Sequence[Sample], name: str) -> list[Point]:
    """The values of one column."""
    return [Point(one.at_s, one.process, float(getattr(one, name))) for one in samples]


# --- pictures ---------------------------------------------------------------------------------------------------------


def write_pictures(story: Story, directory: Path) -> None:
    """One SVG for each quantity."""
    marks = [Mark(one.at_s, one.kind, MARKED[one.kind]) for one in story.played if one.kind in MARKED]
    for name, title, columns in (
        ("memory", "Resident memory of the daemon, MiB", ("rss_mib",)),
        ("descriptors", "Open descriptors and threads of the daemon", ("descriptors", "threads")),
        ("journal", "Journal, MiB", ("journal_mib",)),
    ):
        lines = {column: _parts(points(story.samples, column)) for column in columns}
        (directory / f"{name}.svg").write_text(chart(title, lines, marks, from_zero=True))
    title = "Requests of the daemon at the API server, a minute"
    (directory / "requests.svg").write_text(chart(title, _rates(story.samples), marks, from_zero=True))


def _parts(found: Sequence[Point]) -> list[Points]:
    return [[(point.at_s, point.value) for point in mine] for mine in processes(found)]


def _rates(samples: Sequence[Sample]) -> dict[str, list[Points]]:
    """Requests of each minute, by kind; the rarest together as `others`."""
    if not samples:
        return {}
    often = [name for name, _ in Counter(samples[-1].requests).most_common(MOST_KINDS)]
    found: dict[str, list[Points]] = {}
    for name in (*often, "others"):
        counts: list[tuple[float, float]] = []
        before, since_s = 0, 0.0
        for sample in samples:
            total = sum(
                n for kind, n in sample.requests.items() if (kind if kind in often else "others") == name
            )
            if sample.at_s - since_s >= MINUTE_S:
                counts.append((sample.at_s, (total - before) * MINUTE_S / (sample.at_s - since_s)))
                before, since_s = total, sample.at_s
        found[name] = [counts]
    return found


# --- the page ---------------------------------------------------------------------------------------------------------


def page(story: Story) -> str:
    """The summary."""
    wrong = story.verdict()
    pods = [one for one in story.tenants if one.ran_after_s is not None]
    slowest = max(pods, key=lambda one: one.ran_after_s or 0.0, default=None)
    lines = [
        "# A soak of the node", "",
        f"{story.what}. Seed {story.seed}, {story.lasted_s / 3600:.2f} hours, {story.rounds} rounds, "
        f"{len(story.played)} events.", "",
        *([f"**Failed**: {words}" for words in wrong] or ["**Nothing was wrong.**"]), "",
        f"Of {len(story.tenants)} pods {len(pods)} ran"
        + (f"; the slowest, {slowest.name}, after {slowest.ran_after_s:.0f} s" if slowest else "") + ".", "",
        *_table(("events", "played", "nothing to do"), _events(story)),
        *_table(("pods", "made", "ran", "refused", "ended before either"), _pods(story)),
        *_table(("refusals by kubelet", "times"), _refusals(story)),
        *_table(("refused prepares, as kubelet reports them", "times"), story.refused_prepares.items()),
        *_table(("of the daemon", "first", "last", "most", "growth an hour"), _growth(story)),
        *_table(("requests at the API server", "times"), _requests(story)),
        *(f"![{name}]({name}.svg)" for name in ("memory", "descriptors", "journal", "requests")),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    listed = [tuple(str(cell).replace("|", "/") for cell in row) for row in rows]
    if not listed:
        return []
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *listed)] + [""]


def _events(story: Story) -> Iterator[tuple[object, ...]]:
    total, idle = (
        Counter(one.kind for one in story.played),
        Counter(o.kind for o in story.played if not o.did),
    )
    for kind, count in sorted(total.items()):
        yield kind, count - idle[kind], idle[kind]


def _pods(story: Story) -> Iterator[tuple[object, ...]]:
    for kind in sorted({one.kind for one in story.tenants}):
        mine = [one for one in story.tenants if one.kind == kind]
        ran = sum(one.ran_after_s is not None for one in mine)
        refused = sum(one.refused_by != "" for one in mine)
        yield kind, len(mine), ran, refused, len(mine) - ran - refused


def _refusals(story: Story) -> Iterator[tuple[object, ...]]:
    counts = Counter(without_names(one.refused_by) for one in story.tenants if one.refused_by)
    yield from counts.most_common()


def _growth(story: Story) -> Iterator[tuple[object, ...]]:
    for name in ("rss_mib", "descriptors", "threads", "journal_mib"):
        found = points(story.samples, name)
        if found:
            slope = slope_an_hour(found)
            yield (
                name, f"{found[0].value:g}", f"{found[-1].value:g}", f"{max(p.value for p in found):g}",
                f"no process lived for more than {WARM_UP_S:.0f} s" if slope is None else f"{slope:+.2f}",
            )  # fmt: skip


def _requests(story: Story) -> Iterator[tuple[object, ...]]:
    if story.samples:
        yield from Counter(story.samples[-1].requests).most_common()


def write(story: Story, directory: Path) -> None:
    """Pictures, summary, the events, and the requests by kind."""
    write_pictures(story, directory)
    (directory / "summary.md").write_text(page(story))
    (directory / "events.txt").write_text("".join(f"{one}\n" for one in story.played))
    with (directory / "requests.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("at_s", "kind", "times"))
        for sample in story.samples:
            writer.writerows((sample.at_s, kind, times) for kind, times in sorted(sample.requests.items()))


__all__ = ["Played", "Story", "page", "write"]
