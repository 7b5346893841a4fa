"""What each node asks of the API server, and that nodes do not ask at one moment: on the mock clock, with some nodes.

`./do scale` makes the tables of docs/dev/scale.md with thousands.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.scale.fleet import Served
from tests.scale.tally import Tally
from tests.scale.virtual import bring_up, play

NODES = 5
GPUS, BOTH = Served(), Served(domains=True)

START = {
    "list resourceslices": 1, "watch resourceslices": 1, "get nodes": 1, "create resourceslices (dry run)": 1,
    "create resourceslices": 1, "list deviceclasses": 1,
}  # fmt: skip
IDLE = {"watch resourceslices": 1, "create resourceslices (dry run)": 1}
RETURN = {"list resourceslices": 1, "watch resourceslices": 1, "create resourceslices (dry run)": 1}
OF_BOTH = {"list resourceslices": 2, "watch resourceslices": 2, "create resourceslices (dry run)": 2}


@pytest.mark.parametrize(
    ("scenario", "served", "each"),
    [
        ("start of all at once", GPUS, START),
        ("idle, an hour", GPUS, IDLE),
        ("idle, an hour", BOTH, dict.fromkeys(IDLE, 2) | {"watch nodes": 1}),
        ("rolling restart of kubelets", GPUS, {"get nodes": 1, "create resourceslices": 1}),
        (
            "rolling restart of the daemon",
            GPUS,
            {w: n for w, n in START.items() if w != "create resourceslices"},
        ),
        ("all watches break, a server is there", GPUS, RETURN),
        ("return of an API server after 10 minutes", BOTH, OF_BOTH | {"watch nodes": 1, "get nodes": 1}),
    ],
)
def test_each_node_asks_so_often(scenario: str, served: Served, each: Mapping[str, int]) -> None:
    found = play(NODES, served, scenario)
    assert dict(found.asked) == {what: count * NODES for what, count in each.items()}
    if scenario == "all watches break, a server is there":
        assert found.connections == 2 * NODES, "a watch has the connection of its list"


def spread(found: Tally, seconds: int) -> None:
    """No `seconds` have much more than their share of what all of them were asked."""
    assert found.peak <= 2.5 * found.total / seconds + 3, found.seconds


def test_watches_that_break_at_one_moment_come_back_over_seconds() -> None:
    """Before: a list and a watch of each node within 0.15 s."""
    spread(play(40, GPUS, "all watches break, a server is there"), 8)


def test_after_an_outage_nodes_come_back_over_many_seconds() -> None:
    found = play(40, GPUS, "return of an API server after 10 minutes")
    spread(found, 20)
    assert max(found.seconds) - min(found.seconds) > 40, "the dry runs take a minute"


def test_watches_that_began_together_are_renewed_minutes_apart() -> None:
    found = play(15, GPUS, "idle, an hour")
    assert max(found.seconds) - min(found.seconds) > 1200.0
    assert found.peak <= 2


def test_the_domains_of_other_nodes_cost_a_node_one_list_of_their_metadata() -> None:
    """Before: every node got each change of every domain, and listed all of them while its claim waited."""
    few, many = bring_up(1, 4), bring_up(25, 4)
    assert few.asked["get computedomaincliques"] == many.asked["get computedomaincliques"] > 0
    assert few.events["MODIFIED computedomains"] == many.events["MODIFIED computedomains"] > 0
    grown = many.answer_bytes["list computedomains"] - few.answer_bytes["list computedomains"]
    assert grown < 4 * 24 * 400
    assert many.asked["watch computedomains"] == 4
