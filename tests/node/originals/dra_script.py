"""The script's part about DRA plugins: how kubelet finds them, and what it asks of them for claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final

import grpc

from tests.node.originals.dra_plugin import DraPlugin, Info
from tests.node.originals.kubelets import PREFIX, DraKubelet, PodState
from tests.node.originals.node import until
from tests.node.originals.play import Play
from tests.node.originals.plugin import Call, Refusal

DRIVER: Final = "script.example"
OTHER: Final = "other.script.example"

PREPARE: Final = "NodePrepareResources"
UNPREPARE: Final = "NodeUnprepareResources"


class DraPlay:
    """A play with DRA plugins, and pods that have claims."""

    def __init__(self, play: Play, kubelet: DraKubelet, stack: ExitStack) -> None:
        self.note = play.note
        self.play = play
        self.kubelet = kubelet
        self._stack = stack

    def plugin(self, name: str, info: Info) -> DraPlugin:
        """A plugin that serves. It stops with the group."""
        plugin = DraPlugin(self.kubelet.directory, name, info)
        self._stack.callback(plugin.stop)
        return plugin

    def told(self, plugin: DraPlugin, count: int = 1) -> list[tuple[bool, str]]:
        """What kubelet has told the plugin, as soon as it is so much."""
        until(lambda: len(plugin.told) >= count)
        return [
            (registered, error.replace(str(self.kubelet.directory), "KUBELET"))
            for registered, error in plugin.told
        ]

    def create(self, pod: str, *claims: str) -> None:
        """Creates a pod with claims."""
        self.kubelet.create_with_claims(PREFIX + pod, *(PREFIX + claim for claim in claims))

    def claim(self, claim: str, *drivers: str) -> None:
        """Creates a ResourceClaim."""
        self.kubelet.create_claim(PREFIX + claim, *drivers)

    def run(self, pod: str, *claims: str) -> PodState | None:
        """Creates a pod with claims and waits until it is settled."""
        self.create(pod, *claims)
        return self.play.settled(pod)

    def end(self, pod: str) -> bool:
        """Deletes a pod; whether it went."""
        self.kubelet.delete(PREFIX + pod)
        return until(lambda: self.play.state(pod) is None)


# --- registration -----------------------------------------------------------------------------------------------


def dra_registration(play: DraPlay) -> None:
    """Sockets in `plugins_registry`: which are asked, registered and refused."""
    plugin = play.plugin("first", Info(DRIVER))
    # The health stream is opened beside these, some time before the first claim.
    play.note("a plugin", told=play.told(plugin), calls=plugin.asked("GetInfo", "NotifyRegistrationStatus"))
    refused: Mapping[str, Info] = {
        "another type": Info(OTHER, type="Odd"),
        "a version that kubelet does not know": Info(OTHER, versions=("v9.DRAPlugin",)),
        "a bare version": Info(OTHER, versions=("1.0.0",)),
        "no version": Info(OTHER, versions=()),
        "no endpoint": Info(OTHER, endpoint=""),
        "no name": Info(""),
        "the endpoint of another": Info(DRIVER, endpoint=str(plugin.endpoint)),
    }
    plugins = {why: play.plugin(f"odd-{n}", info) for n, (why, info) in enumerate(refused.items())}
    for why, odd in plugins.items():
        play.note(why, told=play.told(odd), calls=odd.asked("GetInfo", PREPARE)[:1])

    play.claim("one", DRIVER)
    play.claim("two", DRIVER)
    play.claim("three", DRIVER)
    newer = play.plugin("newer", Info(DRIVER))
    told = play.told(newer)
    pod = play.run("newer", "one")
    play.note(
        "a second instance", told=told, pod=pod, calls=newer.asked(PREPARE), older=plugin.asked(PREPARE)
    )
    newer.deregister()
    registered = until(lambda: not newer.registry.exists())
    late = play.plugin("late", Info(OTHER))  # kubelet has seen both changes when it has asked this one
    play.told(late)
    pod = play.run("older", "two")
    play.note(
        "the second instance is gone",
        gone=registered,
        pod=pod,
        calls=newer.asked(PREPARE),
        older=plugin.asked(PREPARE),
    )
    play.note(
        "the first one unprepares what the second has prepared",
        gone=play.end("newer"),
        calls=newer.asked(UNPREPARE),
        older=plugin.asked(UNPREPARE),
    )


def dra_restart(play: DraPlay) -> None:
    """Kubelet is restarted under a pod with a claim: it registers the plugin by itself, and deletes the slices."""
    plugin = play.plugin("restart", Info(DRIVER))
    play.told(plugin)
    play.claim("one", DRIVER)
    play.claim("two", DRIVER)
    play.note("a pod", pod=play.run("one", "one"), calls=plugin.asked(PREPARE))
    play.kubelet.create_slice(DRIVER)
    play.kubelet.create_slice(OTHER)
    play.note("slices", drivers=sorted(play.kubelet.slices()))
    play.kubelet.stop()
    play.kubelet.start()
    wiped = until(lambda: not play.kubelet.slices())
    play.note("kubelet starts", wiped=wiped, told=play.told(plugin, 2))
    listed = play.play.until_listed("one")
    play.note("the pod", pod=play.play.settled("one"), listed=listed, calls=plugin.asked(PREPARE))
    play.note("a pod after that", pod=play.run("two", "two"), calls=plugin.asked(PREPARE))
    gone = (play.end("one"), play.end("two"))
    asked = sorted({str(dict(call.fields)["claims"]) for call in plugin.asked(UNPREPARE)})
    play.note("both end", gone=gone, claims=asked)  # an unprepare may be repeated


# --- claims -----------------------------------------------------------------------------------------------------


def dra_claims(play: DraPlay) -> None:
    """Claims: prepared once, refused, and let go by their last pod."""
    plugin = play.plugin(
        "claims", Info(DRIVER, versions=("v9.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAPlugin"))
    )
    other = play.plugin("other", Info(OTHER))
    play.told(plugin)
    play.told(other)
    claims = {
        "one": (DRIVER,),
        "shared": (DRIVER,),
        "both": (DRIVER, OTHER),
        "free": (),
        "nobodys": ("nobody",),
    }
    for claim, drivers in claims.items():
        play.claim(claim, *drivers)
    pod = play.run("one", "one", "shared")
    play.note("a pod with two claims", pod=pod, calls=_sorted_calls(plugin), listed=play.play.listed())
    pod = play.run("two", "shared")
    play.note("a shared claim", pod=pod, calls=len(plugin.asked(PREPARE)), listed=play.play.listed())
    pod = play.run("three", "both")
    play.note(
        "two drivers",
        pod=pod,
        calls=plugin.asked(PREPARE)[-1:],
        other=other.asked(PREPARE),
        listed=_sorted_devices(play.play.listed()["three"]),
    )
    play.note("the first of its pods ends", gone=play.end("one"), calls=plugin.asked(UNPREPARE))
    play.note("its last pod ends", gone=play.end("two"), calls=plugin.asked(UNPREPARE))
    play.note(
        "the end of two drivers",
        gone=play.end("three"),
        calls=plugin.asked(UNPREPARE)[-1:],
        other=other.asked(UNPREPARE),
    )
    play.note("a claim that is not allocated", pod=play.run("free", "free"))
    play.note("a driver that is not registered", pod=play.run("nobodys", "nobodys"))


def dra_errors(play: DraPlay) -> None:
    """Answers to a prepare that fail the pod's start."""
    plugin = play.plugin("errors", Info(DRIVER))
    play.told(plugin)

    def refused(claim: str) -> PodState | None:
        play.claim(claim, DRIVER)
        return play.run(claim, claim)

    plugin.errors[PREFIX + "wrong"] = "the GPU is held"
    play.note("an error for the claim", pod=refused("wrong"), calls=plugin.asked(PREPARE))
    plugin.refusals[PREPARE] = [Refusal(grpc.StatusCode.UNAVAILABLE, "shutting down")]
    play.note("an error of the call", pod=refused("call"))
    plugin.skipped.add(PREFIX + "skipped")
    play.note("no answer for the claim", pod=refused("skipped"))
    plugin.stranger = True
    plugin.skipped.add(PREFIX + "stranger")
    play.note("an answer for another claim", pod=refused("stranger"))
    plugin.stranger = False
    plugin.calls.clear()
    play.note("such a pod ends", gone=play.end("wrong"), calls=plugin.asked(UNPREPARE))
    play.note("its claim", listed=play.play.listed().get("wrong"), got=play.play.got("skipped"))


def _sorted_calls(plugin: DraPlugin) -> list[Call]:
    """The health stream is opened beside the other calls, in no order."""
    return sorted(plugin.asked(), key=lambda call: call.method)


def _sorted_devices(containers: dict[str, Any]) -> dict[str, Any]:
    """The drivers of a claim are asked in no order."""
    for found in containers.values():
        for claim in found:
            claim["devices"].sort(key=lambda device: device["driver"])
    return containers


DRA_GROUPS: Final[Mapping[str, Callable[[DraPlay], None]]] = {
    group.__name__: group for group in (dra_registration, dra_restart, dra_claims, dra_errors)
}
