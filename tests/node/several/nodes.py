"""A cluster of several nodes as a scenario has it: gpuactors and a GPU on each, and NVIDIA's domains over all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Final, TypeVar, final

from tests.node import daemonset, domains, pods
from tests.node.claims import RETRY_S
from tests.node.cluster import CLAIMS, EVENTS, NODES, Api, Object, eventually, kubectl, node_name
from tests.node.daemonset import Daemon
from tests.node.domains import History
from tests.node.fake_host import H100_RESOURCE
from tests.node.lane import Lane, wait
from tests.node.several.member import Member, member
from tests.support.patience import patient

T = TypeVar("T")

H: Final = H100_RESOURCE

DOMAIN: Final = "training"

LABEL_S: Final = patient(120.0)
"""From the last claim of a domain that lives to the end of the label."""

ROLLED_OUT_S: Final = patient(120.0)
"""Of a rolling update, which goes from node to node. Seen: 25 s."""

JOIN_S: Final = patient(60.0)
"""Until a node that is added has its images and gpuactors. Seen: 8 s."""


@final
class Nodes:
    """The nodes, the first of which has the control plane; and what a scenario does with them."""

    def __init__(self, lanes: Sequence[Lane], stack: ExitStack) -> None:
        self.api = Api()
        self.history = History()
        self.members: list[Member] = []
        self.installed = daemonset.Installed(())
        self._spare = lanes[-1]
        self._stack = stack
        for lane in lanes[:-1]:  # all at once: each imports its images
            self._enter(lane)
        for one in self.members:
            one.answer("its start")

    def _enter(self, lane: Lane) -> Member:
        name = f"worker-{lane.worker}" if lane.worker else node_name()
        self.members.append(self._stack.enter_context(member(lane, name)))
        return self.members[-1]

    def join(self) -> Member:
        """One node more, which runs and has gpuactors at the end."""
        wait(self._spare.start((str(self._spare.join),), os.environ), JOIN_S, None)
        found = self._enter(self._spare)
        found.answer("its start")
        found.ask("plug", found.slot)
        self.daemon(found)
        return found

    # --- gpuactors ----------------------------------------------------------------------------------------------------

    def install(self) -> daemonset.Installed:
        """gpuactors on each, with GPUs by the device plugin, by claims, and domains. Waits until all are ready."""
        self.installed = daemonset.install("compute-domains")
        self.ready()
        return self.installed

    @contextmanager
    def without_gpuactors(self) -> Iterator[None]:
        """It is on no node while the context is open, and on each afterwards."""
        daemonset.uninstall(self.installed)
        daemonset.wait_gone(self.api)
        try:
            yield
        finally:
            self.install()

    def ready(self) -> None:
        """Waits until gpuactors is ready on each."""
        for one in self.members:
            self.daemon(one)

    def daemon(self, of: Member) -> Daemon:
        """The ready pod of gpuactors on a node."""
        return daemonset.wait_ready(self.api, node=of.name)

    def set_image(self, image: str) -> None:
        """Begins a rolling update."""
        kubectl("set", "image", "-n", daemonset.NAMESPACE, "daemonset/gpuactors", f"gpuactors={image}")

    @contextmanager
    def drained(self, *members: Member) -> Iterator[None]:
        """No pod but those of DaemonSets runs on these nodes while the context is open."""
        try:
            for one in members:
                kubectl(
                    "drain", one.name, "--ignore-daemonsets", "--force", "--delete-emptydir-data",
                    f"--timeout={patient(60):.0f}s", timeout_s=90,
                )  # fmt: skip
            yield
        finally:
            for one in members:
                kubectl("uncordon", one.name)

    # --- pods ---------------------------------------------------------------------------------------------------------

    def make(self, name: str, uid: str, of: Member, **options: Any) -> None:
        """Creates a pod of a node with a channel of the domain, whose UID this is."""
        pods.create(self.api, domains.workload(name, DOMAIN, uid, node=of.name, **options))

    def run(self, names: Iterable[str]) -> None:
        """Waits until these pods run."""
        for name in names:
            pods.wait_running(self.api, name, RETRY_S)

    def on_each(self, what: Callable[[Member], T]) -> list[T]:
        """Does it for all nodes at once."""
        with ThreadPoolExecutor(len(self.members)) as threads:
            return list(threads.map(what, self.members))

    def start_on_each(self, prefix: str, uid: str, **options: Any) -> list[str]:
        """A pod with a channel of the domain on each: their names, when all run."""
        names = [f"{prefix}-{one.number}" for one in self.members]
        for name, one in zip(names, self.members, strict=True):
            self.make(name, uid, one, **options)
        self.run(names)
        return names

    def refused(self) -> list[str]:
        """The pods of the scenario whose claim the API server has refused kubelet once: it had not seen yet that the
        claim is its pod's."""
        ours = {seen.uid for seen in self.history.of("Pod", self.api)}
        events = self.api.items(EVENTS, fieldSelector="reason=FailedPrepareDynamicResources")
        about = [e["involvedObject"] for e in events if domains.NOT_SEEN_YET in e["message"]]
        return sorted(pod["name"] for pod in about if pod["uid"] in ours)

    def waited_for_another(self, of: Member) -> frozenset[str]:
        """The claims of a node's workloads that have waited for another one to be released, by what gpuactors says."""
        return frozenset(
            str(line["claim"])
            for line in self.daemon(of).log()
            if line["event"] == "claim.waiting" and "belongs to the claim" in str(line["reason"])
        )

    # --- domains ------------------------------------------------------------------------------------------------------

    def create(self) -> str:
        """A domain: its UID."""
        return domains.create_domain(self.api, DOMAIN)

    def delete(self) -> None:
        """Deletes the domain, and waits until the controller has let it go."""
        domains.delete_domain(self.api, DOMAIN)
        eventually(lambda: self.api.find(f"{domains.DOMAINS}/{DOMAIN}") is None, "the end of the domain")

    def all_ready(self, uid: str) -> None:
        """Waits until the status of a domain has each node as ready."""
        names = {one.name for one in self.members}
        eventually(lambda: domains.ready_nodes(self.api, uid) >= names, "a domain that is ready on all nodes")

    def daemon_of(self, uid: str, of: Member) -> Object:
        """The pod of a domain's daemon on a node, when it is ready."""

        def look() -> Object | None:
            return next(filter(domains.is_ready, domains.daemons(self.api, uid, of.name)), None)

        found = eventually(look, f"a ready daemon on {of.name}")
        assert found is not None
        return found

    def daemons(self, uid: str) -> dict[str, str]:
        """The UID of the pod of a domain's daemon by node, when all are ready."""
        return {one.name: self.daemon_of(uid, one)["metadata"]["uid"] for one in self.members}

    def label(self, of: Member) -> str | None:
        """As it is now."""
        return domains.label_of(self.api.get(f"{NODES}/{of.name}"))

    def values(self, of: Member) -> list[str | None]:
        """Each value that the label of a node was given since the scenario began."""
        return [seen.value for seen in self.history.label(self.api, of.name)]

    # --- what must hold -----------------------------------------------------------------------------------------------

    def kept_label(self, uid: str) -> None:
        """The label of each node was set once, to this domain, and never changed."""
        found = {one.name: self.values(one) for one in self.members}
        assert all(values == [uid] for values in found.values()), f"{found}\n{self.history.told(self.api)}"

    def covered(self, but: Sequence[str] = ()) -> None:
        """No workload has run without its domain's label on its node and a ready daemon there; but for some."""
        wrong = [
            said for said in self.history.uncovered(self.api) if not said.startswith(tuple(f"{n} " for n in but))
        ]  # fmt: skip
        assert not wrong, f"{wrong}\n{self.history.told(self.api)}"

    # --- a scenario's beginning and end -------------------------------------------------------------------------------

    def begin(self) -> None:
        """No tenant and no claim; each node has one GPU."""
        self.clear()
        for one in self.members:
            one.ask("steer_from_now_on", "")
        self.ready()
        self.free({one.name: 1 for one in self.members})
        self.history.begin(self.api)

    def free(self, counts: dict[str, int]) -> None:
        """Waits until each node has so many GPUs by its status."""

        def look() -> bool:
            found = {
                name: int(self.api.get(f"{NODES}/{name}")["status"]["allocatable"].get(H, 0))
                for name in counts
            }
            assert found == counts, found
            return True

        eventually(look, f"the GPUs {counts}")

    def clear(self) -> None:
        """Deletes all pods, claims and domains, and waits until nothing of a domain is left."""
        pods.clear(self.api)
        for domain in self.api.items(domains.ALL_DOMAINS):
            self.api.delete(f"{domains.DOMAINS}/{domain['metadata']['name']}")
        eventually(lambda: not self.api.items(domains.ALL_DOMAINS), "the end of all domains")
        eventually(lambda: not any(map(self.label, self.members)), "the end of all labels", LABEL_S)
        eventually(lambda: not self.api.items(domains.DAEMON_PODS), "the end of the daemons' pods")
        eventually(lambda: not self.api.items(CLAIMS), "the end of all claims")
        eventually(
            lambda: not any(one.ask("files") for one in self.members), "the end of all files of domains"
        )
        assert not [words for one in self.members for words in one.ask("failed")]

    def said(self, words: str) -> None:
        """Into the test's output."""
        print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)
