"""The soak itself, inside the node: rounds of events until the time is over, a signal comes, or something is wrong.

Started by `run.py`. What it leaves is in the directory that it is given.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from tests.node import daemonset, domains
from tests.node.books import Books, Sampler
from tests.node.claims import serving_claims
from tests.node.cluster import EVENTS, Api
from tests.node.fake_host import opened_host
from tests.node.images import add_image
from tests.node.node import Node
from tests.node.run import IMAGE_VARIABLE, NO_DOMAINS
from tests.soak.events import Draw, Event
from tests.soak.player import CARDS, Player, playing
from tests.soak.samples import Samples
from tests.soak.story import Played, Story, page, write
from tests.soak.tenants import without_names

PAUSE_S: Final = 1.0
"""Between two events of a round, at most: the second one meets the first one half done."""

LONG_S: Final = 15.0
"""A round that needs longer to be at rest is told."""

PREPARES: Final = "prepare dynamic resources"
"""In the message of kubelet's event of a refused prepare."""


@final
class Ending:
    """Whether SIGINT or SIGTERM has come: the soak ends after its round."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(self, "asked", True))


@dataclass(slots=True)
class Prepares:
    """The refused prepares that kubelet has reported, each once: events are forgotten after an hour."""

    seen: dict[str, tuple[str, int]] = field(default_factory=dict)

    def look(self, api: Api) -> None:
        """Reads what there is."""
        for event in api.items(EVENTS):
            if PREPARES in event.get("message", ""):
                self.seen[event["metadata"]["uid"]] = event["message"], event.get("count") or 1

    def counts(self) -> dict[str, int]:
        """How often each was reported, by words without names."""
        found: dict[str, int] = {}
        for message, count in self.seen.values():
            words = without_names(message.rpartition(PREPARES)[2].lstrip(": "))
            found[words] = found.get(words, 0) + count
        return found


def main(arguments: Sequence[str]) -> int:
    """1 where something was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    given = parser.parse_args(arguments)
    ending = Ending()
    has_domains = NO_DOMAINS not in os.environ
    api = Api()
    kubernetes = api.get("/version")["gitVersion"]
    story = Story(given.seed, f"Kubernetes {kubernetes}, {len(CARDS)} GPUs, "
                              f"{'with' if has_domains else 'without'} compute domains")  # fmt: skip
    began = time.monotonic()
    samples, prepares = Samples(given.directory, began), Prepares()
    player: Player | None = None
    try:
        with _player(has_domains=has_domains) as player, samples.taking():
            _play(player, story, prepares, ending, given.seconds, has_domains=has_domains)
            story.lasted_s = time.monotonic() - began
    except Exception as error:  # whatever it is, the story that led there is told
        story.failure = f"{type(error).__name__}: {error}"
    story.lasted_s = story.lasted_s or time.monotonic() - began
    story.tenants = list(player.tenants.values()) if player else []
    story.samples, story.refused_prepares = samples.taken, prepares.counts()
    write(story, given.directory)
    print(page(story))
    if story.failure:
        print(f"{story.led_there()}\n{story.failure}\nagain: ./do soak --seed {story.seed}", flush=True)
    return 1 if story.verdict() else 0


@contextmanager
def _player(*, has_domains: bool) -> Iterator[Player]:
    """The node with everything installed."""
    with ExitStack() as stack:
        host = stack.enter_context(opened_host())
        add_image(Path(os.environ[IMAGE_VARIABLE]), daemonset.IMAGE, daemonset.OTHER_IMAGE)
        sampler = Sampler(host)
        stack.enter_context(sampler.watching())
        node = Node(host, Api(), Books(host), sampler)
        if has_domains:
            for one in (domains.imex_loaded(), domains.toolkit(), domains.controller()):
                stack.enter_context(one)
        stack.enter_context(domains.asking_again())
        stack.callback(node.uninstall)
        claims = stack.enter_context(
            serving_claims(node, overlay="compute-domains" if has_domains else "dra")
        )
        yield stack.enter_context(playing(node, claims))


def _play(
    player: Player, story: Story, prepares: Prepares, ending: Ending, seconds: float, *, has_domains: bool
) -> None:  # fmt: skip
    """Raises what a check raises."""
    began = time.monotonic()
    draw = Draw(story.seed, cards=len(CARDS), has_domains=has_domains)
    try:
        while time.monotonic() - began < seconds and not ending.asked:
            story.rounds += 1
            for event in draw.round():
                _event(player, story, event, began)
            since = time.monotonic()
            player.check()
            if (took_s := time.monotonic() - since) > LONG_S:
                print(
                    f"round {story.rounds} was at rest after {took_s:.0f} s: {player.waited_for}", flush=True
                )
            prepares.look(player.api)
        player.clear()
    except BaseException:
        print(player.node.what_is_there(), flush=True)
        raise


def _event(player: Player, story: Story, event: Event, began: float) -> None:
    at_s = time.monotonic() - began
    did = "it failed"
    try:
        did = player.play(event)
    finally:
        story.played.append(Played(round(at_s, 1), story.rounds, event.kind, str(event), did))
        print(story.played[-1], flush=True)
    time.sleep(PAUSE_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
