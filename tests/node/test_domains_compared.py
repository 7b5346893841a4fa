"""The scenarios of compute domains, each once with NVIDIA's own kubelet plugin and once with gpuactors, on one node
with NVIDIA's controller and daemon; and the table of what came out.

    ./do node --set A tests/node/test_domains_compared.py -s

A run of the whole suite leaves them out: it takes some ten minutes. The table is printed, and written to
var/node/domains-compared.md; docs/dra.md has one of them. What NVIDIA's plugin does is reported and not
judged; gpuactors must pass.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Final

import pytest

from tests.node import domains, pods
from tests.node.claims import CLAIMS_OF, NAMESPACE, TEMPLATES_OF, by_name, kubelet_calls
from tests.node.cluster import LateError, eventually
from tests.node.compared import (
    A_DAEMON,
    ITS_LABEL,
    NVIDIAS,
    OURS,
    SEEN_S,
    Course,
    Nvidias,
    Ours,
    Scenario,
    Server,
    Table,
)
from tests.node.conftest import RESULTS
from tests.node.fake_host import NVIDIA
from tests.node.node import Node
from tests.node.nvidia.plugins import nvidias_driver
from tests.node.nvidia.programs import DOMAIN_PLUGIN, directory
from tests.node.run import RELEASES
from tests.node.test_domains import GPU_SLOT, Around, around  # noqa: F401  # a fixture

pytestmark = [pytest.mark.nvidias_domains, pytest.mark.nvidias_plugins, pytest.mark.by_name]

WRITTEN: Final = RESULTS / "domains-compared.md"

REPLACEMENTS: Final = 3
"""By force, one after the other: now and then kubelet ends the old claim sooner than it asks for the new one."""

LATE_S: Final = 12.0
"""Of a daemon: within one call of kubelet to either."""

SCENARIOS: list[Scenario] = []


def scenario(title: str, *lacks: str) -> Callable[[Callable[[Course], str]], None]:
    """The decorated function is a row. `lacks`: what others take from a workload in it."""
    return lambda play: SCENARIOS.append(Scenario(title, play, frozenset(lacks)))


# --- replaced ---------------------------------------------------------------------------------------------------------


@scenario("A domain is made, and its first workload starts")
def first_workload(at: Course) -> str:
    uid = at.create()
    began = time.monotonic()
    at.make("job-0", uid)
    return f"runs after {at.runs_after('job-0', began)}"


@scenario("A second workload waits for the channel, and the first one ends")
def second_workload_waits(at: Course) -> str:
    uid = at.create()
    at.start("job-0", uid)
    at.make("job-1", uid)
    at.stays_waiting("job-1", 2.0)
    began = time.monotonic()
    pods.delete(at.api, "job-0")
    return f"the second runs after {at.runs_after('job-1', began)}"


@scenario("The same, and the first one ignores SIGTERM for 8 s")
def first_workload_ends_late(at: Course) -> str:
    uid = at.create()
    at.start("job-0", uid, dies_after_s=60, grace_s=8)
    at.make("job-1", uid)
    began = time.monotonic()
    pods.delete(at.api, "job-0")
    return f"the second runs after {at.runs_after('job-1', began)}"


@scenario("Workloads are replaced by force, three times in turn")
def replaced_by_force(at: Course) -> str:
    """The API server forgets the old pod at once, and kubelet kills its container after 1 s."""
    uid = at.create()
    at.start("job-0", uid, dies_after_s=60)
    times, came_first = [], 0
    for i in range(REPLACEMENTS):
        old = at.claim_uid(f"job-{i}")
        at.make(f"job-{i + 1}", uid, dies_after_s=60)
        began = time.monotonic()
        pods.delete(at.api, f"job-{i}", grace_s=0)
        times.append(at.runs_after(f"job-{i + 1}", began))
        came_first += at.came_first(at.claim_uid(f"job-{i + 1}"), old)
    return (
        f"run after {', '.join(times)}; {came_first} of {REPLACEMENTS} prepares came before the old unprepare"
    )


@scenario("One claim, two pods, and kubelet restarts in between: the channel is asked for twice", A_DAEMON)
def asked_twice(at: Course) -> str:
    uid = at.create()
    template = at.api.get(f"{TEMPLATES_OF.format(NAMESPACE)}/training-channel")
    claim = {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "shared"},
        "spec": template["spec"]["spec"],
    }  # fmt: skip
    asked = at.api.create(CLAIMS_OF.format(NAMESPACE), claim)["metadata"]["uid"]
    for name in ("job-0", "job-1"):
        began = time.monotonic()
        pods.create(
            at.api,
            pods.tenant(
                name, claims=[by_name("shared")], command=domains.WORKLOAD.replace("{dies_after_s}", "0"),
                labels={domains.DOMAIN_OF: uid},
            ),
        )  # fmt: skip
        took = at.runs_after(name, began)
        if name == "job-0":
            at.restart_kubelet()
    # Kubelet's log begins with its start.
    again = any(call.uid == asked for call in kubelet_calls())
    at.ends("job-0")
    at.stays_running("job-1", SEEN_S)
    return f"{'prepared again' if again else 'not asked for again'}; the second pod runs after {took}"


# --- restarts ---------------------------------------------------------------------------------------------------------


@scenario("Kubelet restarts while a workload runs, which ends then", A_DAEMON)
def kubelet_restarts(at: Course) -> str:
    """Kubelet takes each container for not ready until it has probed it."""
    uid = at.create()
    at.start("job-0", uid)
    at.restart_kubelet()
    at.stays_running("job-0", 5.0)
    return f"runs on; its end takes {at.ends('job-0')}"


@scenario("The kubelet plugin is killed while a workload runs, which ends then; the next one starts")
def killed_while_it_runs(at: Course) -> str:
    uid = at.create()
    at.start("job-0", uid)
    at.server.kill()
    at.server.serves()
    at.stays_running("job-0", SEEN_S)
    ended = at.ends("job-0")
    began = time.monotonic()
    at.make("job-1", uid)
    return f"runs on; its end takes {ended}, the next runs after {at.runs_after('job-1', began)}"


@scenario("The kubelet plugin is killed while a claim ends; the next workload starts")
def killed_while_a_claim_ends(at: Course) -> str:
    uid = at.create()
    at.start("job-0", uid)
    began = time.monotonic()
    pods.delete(at.api, "job-0")
    at.server.kill()
    ended = at.is_gone_after("job-0", began)
    at.server.serves()
    began = time.monotonic()
    at.make("job-1", uid)
    return f"the end takes {ended}, the next runs after {at.runs_after('job-1', began)}"


@scenario("The kubelet plugin is killed while a claim waits for the domain's daemon, which is ready then")
def killed_while_a_claim_waits(at: Course) -> str:
    at.steering.words = "ready=no\n"
    uid = at.create()
    at.make("job-0", uid)
    claim = at.claim_uid("job-0")
    eventually(lambda: any(call.uid == claim for call in kubelet_calls()), "the prepare of job-0")
    at.daemon_runs(uid)
    began = time.monotonic()
    at.server.kill()
    at.steering.steer(uid, "ready=yes\n")
    return f"runs after {at.runs_after('job-0', began)}"


@scenario("The domain's daemon is ready 12 s late")
def daemon_is_late(at: Course) -> str:
    at.steering.words = "ready=no\n"
    uid = at.create()
    at.make("job-0", uid)
    at.daemon_runs(uid)
    at.stays_waiting("job-0", LATE_S)
    began = time.monotonic()
    at.steering.steer(uid, "ready=yes\n")
    return f"waits, and runs {at.runs_after('job-0', began)} after it"


# --- several domains --------------------------------------------------------------------------------------------------


@scenario("Two domains in turn on one node")
def two_domains(at: Course) -> str:
    first, second = at.create(), at.create("other")
    at.start("job-0", first)
    at.make("job-1", second, domain="other")
    at.stays_waiting("job-1", 2.0)
    began = time.monotonic()
    pods.delete(at.api, "job-0")
    took = at.runs_after("job-1", began)
    values = [value for value in at.values() if value is not None]
    assert values == [first, second], values
    return f"the second domain's workload runs after {took}"


@scenario(
    "The domain is deleted under its workload; one of the same name is made, and used", A_DAEMON, ITS_LABEL
)
def deleted_under_its_workload(at: Course) -> str:
    uid = at.create()
    at.start("job-0", uid)
    at.delete()
    eventually(lambda: not domains.daemons(at.api, uid), "the end of the domain's daemon")
    at.stays_running("job-0", SEEN_S)
    ended = at.ends("job-0")
    second = at.create()
    began = time.monotonic()
    at.make("job-1", second)
    return f"runs on; its end takes {ended}, the next domain's runs after {at.runs_after('job-1', began)}"


# --- played -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(whole_node: Node) -> Iterator[Table]:
    """Written down at the end."""
    found = Table()
    yield found
    plugin = subprocess.run(
        (directory() / DOMAIN_PLUGIN, "--version"), capture_output=True, text=True, check=False
    )
    text = found.text(
        {
            "Kubernetes": os.environ.get(RELEASES, "").rpartition(" ")[2],
            "NVIDIA's kubelet plugin": plugin.stdout.strip().rpartition(" ")[2],
            OURS: version("gpuactors"),
        }
    )
    WRITTEN.write_text(text)
    whole_node.said(f"{WRITTEN}:\n\n{text}")


@pytest.fixture(scope="module", params=[NVIDIAS, OURS])
def server(
    request: pytest.FixtureRequest,
    whole_node: Node,
    around: Around,  # noqa: F811
    table: Table,
) -> Iterator[Server]:
    """One of both, for all scenarios: nothing of the other one is there."""
    whole_node.uninstall()
    if request.param == OURS:
        yield Ours(whole_node)
        return
    with nvidias_driver(whole_node.api, whole_node.host) as driver:
        yield Nvidias(driver)


@pytest.mark.parametrize("played", SCENARIOS, ids=[one.play.__name__ for one in SCENARIOS])
def test_it_is_compared(node: Node, around: Around, server: Server, table: Table, played: Scenario) -> None:  # noqa: F811
    node.host.plug(GPU_SLOT, driver=NVIDIA)
    course = Course(node, around, server)
    late: LateError | AssertionError | None = None
    with course.played():
        try:
            said = played.play(course)
        except (LateError, AssertionError) as error:
            late = error
            said = f"**{str(error).splitlines()[0]}**"
        faults, changes = (f"**{fault}**" for fault in course.faults()), course.changes()
        cell = "; ".join([said, *faults, *changes, *course.refused()])
        wrong = [*course.faults(played.lacks), *changes]
    table.add(played.title, server.name, cell)
    node.said(f"{server.name}: {played.title}: {cell}")
    if server.name == OURS:
        assert late is None, late
        assert not wrong, f"{wrong}\n{course.history.told(node.api)}"
