"""A node that joins a domain which is running. In a file of its own, the last one: the node stays."""

from __future__ import annotations

import pytest

from tests.node.several.nodes import Nodes

pytestmark = pytest.mark.nvidias_domains


@pytest.mark.usefixtures("asking_again")
def test_one_node_more_joins_a_running_domain(nodes: Nodes) -> None:
    uid = nodes.create()
    names = nodes.start_on_each("job", uid)
    before = nodes.daemons(uid)
    joined = nodes.join()
    nodes.make(f"job-{joined.number}", uid, joined)
    nodes.run([*names, f"job-{joined.number}"])
    nodes.all_ready(uid)
    assert before.items() <= nodes.daemons(uid).items()
    nodes.covered()
    nodes.kept_label(uid)
