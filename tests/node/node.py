"""The node as a scenario has it: plug and bind on the host, install the daemon, and look at the books."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, final

from tests.node import daemonset, pods
from tests.node.books import Books, Sampler
from tests.node.cluster import (
    CLAIMS,
    NODES,
    SLICES,
    Api,
    Object,
    component,
    eventually,
    kubectl,
    kubelet_dir,
    node_name,
)
from tests.node.daemonset import Daemon, Installed
from tests.node.fake_host import FakeHost
from tests.node.rules import Excuse, Look, unexcused, unsettled, without_ended
from tests.support.patience import patient

SETTLE_S: Final = 30.0
"""From a change to true books: the node's status comes each second here, the daemon's own reads within seconds."""

NO_PLUGIN_S: Final = 30.0
"""A daemon that is started again, until kubelet has its list."""

POSTED_S: Final = patient(1.8)
"""Less than two periods of the node's status: what is seen for longer was posted twice."""

DRA_DRIVERS: Final = ("gpu.nvidia.com", "compute-domain.nvidia.com")
"""Whose state is below kubelet's directory, and whose slices the daemon writes."""

TENANTS_NAMESPACE: Final = "default"


@final
class Node:
    """What a scenario does, and what it checks."""

    def __init__(self, host: FakeHost, api: Api, books: Books, sampler: Sampler) -> None:
        self.host = host
        self.api = api
        self.books = books
        self.sampler = sampler
        self.name = node_name()
        self._installed: Installed | None = None
        self._what: object = None
        self._excuses: list[Excuse] = []
        self._before: Mapping[str, int] = {}
        """The capacity when the scenario began."""

    # --- the daemon -------------------------------------------------------------------------------------------------

    def install(self, overlay: str = "base", environment: Mapping[str, str] | None = None) -> Daemon:
        """The daemon by an overlay and settings; nothing is done where it runs so already. Waits until it is ready."""
        what = (overlay, dict(environment or {}), daemonset.IMAGE)
        if self._what != what:
            self.uninstall()
            self._installed = daemonset.install(overlay, environment)
            self._what = what
        return self.daemon()

    def install_chart(
        self, values: Mapping[str, object], environment: Mapping[str, str] | None = None
    ) -> Daemon:
        """The daemon by the chart. Waits until it is ready."""
        self.uninstall()
        self._installed = daemonset.install_chart(values, environment)
        self._what = ("chart", dict(values))
        return self.daemon()

    def switch(self, installing: Callable[[], Installed]) -> Daemon:
        """Applies another installation over this one, and deletes what only this one has: a rolling change.
        Waits until it is over."""
        before = self._installed
        self._installed, self._what = installing(), ("switched",)
        try:
            daemonset.wait_rolled_out(self.api)
        finally:
            if before is not None:
                daemonset.prune(before, self._installed)
        return self.daemon()

    def update(self, image: str) -> None:
        """A rolling update to another image, as `kubectl set image` starts it. Waits until it is over."""
        before = self.daemon()
        kubectl("set", "image", "-n", daemonset.NAMESPACE, "daemonset/gpuactors", f"gpuactors={image}")
        kubectl(
            "rollout",
            "status",
            "-n",
            daemonset.NAMESPACE,
            "daemonset/gpuactors",
            "--timeout=90s",
            timeout_s=120,
        )
        eventually(lambda: self.daemon().uid != before.uid, "another pod after the update")
        self._what = (self._what, image)  # as no overlay has it: the next `install` starts anew

    def daemon(self) -> Daemon:
        """The ready pod of the DaemonSet."""
        return daemonset.wait_ready(self.api)

    def uninstall(self) -> None:
        """Takes the daemon away, with all that was applied with it and all that it has left."""
        if self.take_away():
            # What a claim's GPU is returned to was noted in this boot, and the next test plugs another GPU in there.
            for driver in DRA_DRIVERS:
                shutil.rmtree(kubelet_dir() / "plugins" / driver, ignore_errors=True)
            # Kubelet deletes them 30 s later. Until then they offer what the next test's pods have.
            for one in self.api.items(SLICES):
                if one["spec"]["driver"] in DRA_DRIVERS:
                    self.api.delete(f"{SLICES}/{one['metadata']['name']}")

    def take_away(self) -> bool:
        """Takes the daemon away, with all that was applied with it, as an operator does it: its state and slices stay.
        Whether there was one."""
        installed = self._installed
        if installed is not None:
            daemonset.uninstall(installed)
            daemonset.wait_gone(self.api)
        self._installed = self._what = None
        return installed is not None

    def changed(self) -> None:
        """The installation was changed by hand: the next test installs anew."""
        self._what = ("changed",)

    # --- a scenario's beginning and end -----------------------------------------------------------------------------

    def reset(self) -> None:
        """No tenant, no claim, no GPU; what the sampler has seen is forgotten."""
        self.host.silent = False
        pods.clear(self.api)
        for claim in self.api.items(CLAIMS):
            meta = claim["metadata"]
            self.api.delete(
                f"/apis/resource.k8s.io/v1/namespaces/{meta['namespace']}/resourceclaims/{meta['name']}"
            )
        eventually(lambda: not self.api.items(CLAIMS), "the end of all claims")
        self.host.clear()
        if self._installed is not None:
            eventually(self._empty, "an empty node", SETTLE_S)
        self.forget()

    def forget(self) -> None:
        """What was excused and what the sampler has seen: something new begins."""
        self._excuses = []
        self._before = self.books.look().capacity
        self.sampler.forget()

    def _empty(self) -> bool:
        look = self.books.look()
        assert not any(look.allocatable.values()), look.allocatable
        assert not look.healthy or not any(look.healthy.values()), look.healthy
        assert not look.offered, look.offered
        return True

    def excuse(self, words: str, most_s: float) -> None:
        """A fault that the sampler sees, by a part of its sentence, is kubelet's or the scheduler's own here, for at
        most so many seconds together: say why there."""
        self._excuses.append(Excuse(words, most_s))

    def excuse_no_plugin(self, most_s: float = NO_PLUGIN_S) -> None:
        """The daemon or kubelet is to be away for so long, and nobody can register: kubelet has no Healthy device then,
        and subtracts what is allocated. When it is back it posts the node's status late."""
        for words in (
            " is 0 - ", "its capacity is 0", "of a pod is not in kubelet's list",
            "the node's status and kubelet count", "is more than a new pod could have",
        ):  # fmt: skip
            self.excuse(words, most_s)

    def check_always(self) -> None:
        """What the sampler has seen since the test began. Raises AssertionError."""
        faults = self.sampler.faults()
        for fault in faults:
            self.said(f"seen: {fault.said}, {fault.total_s:.1f} s in all")
        wrong = unexcused(faults, self._excuses)
        assert not wrong, wrong
        assert self.sampler.looks > 0, "the sampler has not looked"

    # --- the books --------------------------------------------------------------------------------------------------

    def settled(
        self, allocatable: Mapping[str, int] | None = None, capacity: Mapping[str, int] | None = None,
        within_s: float = SETTLE_S,
    ) -> Look:  # fmt: skip
        """Waits until the books are true, and, where they are given, until exactly these counts are in the node's
        status, where a resource that is not offered any more has 0. The capacity that the plugin of an earlier scenario
        has left counts only where `capacity` names its resource. Raises TimeoutError that says what is wrong."""

        def look() -> Look:
            found = self.books.look()
            wrong = unsettled(found)
            assert not wrong, [str(one) for one in wrong]
            # A plugin of this scenario has this resource: what it leaves is judged.
            self._before = {r: count for r, count in self._before.items() if not found.allocatable.get(r)}
            there = without_ended(found, {r: n for r, n in self._before.items() if r not in (capacity or {})})
            both = ("allocatable", found.allocatable, allocatable), ("capacity", there, capacity)
            for name, counts, wanted in both:
                have = {resource: count for resource, count in counts.items() if count}
                assert wanted is None or have == {r: c for r, c in wanted.items() if c}, f"{name} {have}"
            return found

        found = eventually(look, f"true books with {allocatable or 'any counts'}", within_s)
        assert found is not None
        return found

    def free(self) -> dict[str, int]:
        """Allocatable less requests, as a scheduler sees it."""
        look = self.books.look()
        return {r: count - look.requests.get(r, 0) for r, count in look.allocatable.items()}

    def devices_of(self, pod: str) -> frozenset[str]:
        """What kubelet has given to a pod of the tests."""
        look = self.books.look()
        assert look.allocated is not None
        name = f"{TENANTS_NAMESPACE}/{pod}"
        return frozenset(d for pairs in look.allocated.values() for owner, d in pairs if owner == name)

    def check_open(self, *names: str) -> None:
        """Waits until each of these pods has the groups of its own devices open, and no others. Raises TimeoutError."""

        def own_groups() -> bool:
            owners = self.host.owners()
            for name in names:
                pod = pods.get(self.api, name)
                assert pod is not None, f"there is no pod {name}"
                mine = {group for group, who in owners.items() if f"pod {pod['metadata']['uid']}" in who}
                wanted = {self.host.group_of(device) for device in self.devices_of(name)}
                assert mine == wanted, f"{name} has the groups {mine} open, and the devices of {wanted}"
            return True

        eventually(own_groups, f"{', '.join(names)} to have their groups open")

    # --- others' components -----------------------------------------------------------------------------------------

    @contextmanager
    def without(self, *components: str, environment: Mapping[str, str] | None = None) -> Iterator[None]:
        """Stops components of the node (`kubelet`, `api`, …), and starts them again at the end."""
        with self.sampler.without(components):
            component("down.sh", *components)
            try:
                yield
            finally:
                component("up.sh", *components, environment=environment)

    def restart_kubelet(self) -> None:
        """As systemd does it: 0.6 s."""
        with self.without("kubelet"):
            pass

    # --- words ------------------------------------------------------------------------------------------------------

    def said(self, words: str) -> None:
        """Into the test's output."""
        print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)

    def what_is_there(self) -> str:
        """For the report of a failed test."""
        parts = [f"sampler: {self.sampler.faults()}"]
        reports: tuple[Callable[[], str], ...] = (
            lambda: str(self.books.look()),
            lambda: kubectl("get", "pods,daemonsets,resourceclaims", "-A", "-o", "wide", check=False),
            lambda: kubectl("get", "events", "-A", "--sort-by=.metadata.creationTimestamp", check=False)[
                -4000:
            ],
            lambda: kubectl("describe", "pods", "-n", daemonset.NAMESPACE, check=False)[-5000:],
            self._daemons_log,
        )
        for what in reports:
            try:
                parts.append(what())
            except Exception as error:  # a report of a failure must not fail
                parts.append(f"{type(error).__name__}: {error}")
        return "\n".join(parts)

    def _daemons_log(self) -> str:
        lines: list[str] = []
        for pod in daemonset.pods_of(self.api):
            found = daemonset.daemon_of(pod)
            previous = found.log(previous=True)[-15:] if found.restarts else []
            lines += [str(line) for line in (*previous, *found.log()[-40:])]
        return "\n".join(lines)

    def condition(self, of: Collection[Object], kind: str) -> str:
        """The status of a condition."""
        return next((str(c["status"]) for c in of if c["type"] == kind), "")

    def node_object(self) -> Object:
        """The Node."""
        return self.api.get(f"{NODES}/{self.name}")


def set_of_gates() -> str:
    """`A` or `B`."""
    with open(f"{os.environ['K8S_DIR']}/run/set", encoding="ascii") as file:
        return file.read().strip()


__all__ = ["Node", "set_of_gates"]
