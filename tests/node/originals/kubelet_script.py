"""The script of calls that the original kubelet and its fakes are played: groups of steps, each with an observation.

A group begins with a kubelet that has just started and has no ledger. A step waits for what kubelet should do; where it
does something else, the step notes that at its deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final

import grpc

from tests.node.originals.kubelets import PREFIX, PodState
from tests.node.originals.node import until
from tests.node.originals.play import Play, background
from tests.node.originals.plugin import Device, Plugin, Refusal

A: Final = Device("a")
B: Final = Device("b", nodes=(1,))
C: Final = Device("c")

BAD_NAMES: Final = (
    "no-slash",
    "example.org/",
    "example.org/two/slashes",
    "example.org/ends_in_",
    "example.org/" + 64 * "x",
    "Example.org/x",
    "-example.org/x",
    ".".join(["d" * 49] * 5) + "/x",
    "/x",
    "node.kubernetes.io/x",
    "kubernetes.io/x",
    "requests.example.org/x",
    "",
)

GOOD_NAMES: Final = ("script.example/" + 63 * "x", "script.example/b.C_d-e")


def sick(device: Device) -> Device:
    """The device, Unhealthy."""
    return Device(device.id, "Unhealthy", device.nodes)


# --- registration -----------------------------------------------------------------------------------------------


def registration(play: Play) -> None:
    """Register: what kubelet asks, refuses and forgets."""
    play.note("a kubelet that has started", files=play.sockets(), allocatable=play.allocatable())

    # Kubelet dials for 10 s where nobody listens: both wait beside the other steps.
    lonely = play.plugin("lonely", "lonely")
    forgotten = play.plugin("forgotten", "forgotten")
    play.registered(forgotten, A, B)
    nobody = background(lonely.register, endpoint="script-nobody.sock")
    usurper = play.plugin("usurper", "forgotten")
    missing = background(usurper.register, endpoint="script-missing.sock")

    first = play.plugin("first", "first")
    error = first.register()
    until(lambda: first.streams == 1)
    play.note(
        "register",
        error=error,
        calls=first.calls,
        allocatable=[row for row in play.allocatable() if row[0] == first.resource],
    )
    play.note(
        "first frame",
        allocatable=[row for row in play.sent(first, A, B, sick(C)) if row[0] == first.resource],
        registered=play.file()["registered"].get(first.resource),
        keys=(sorted(play.raw_file()), sorted(play.raw_file()["Data"])),
        counts=play.counts(first, (3, 2)),
    )

    refused = play.plugin("refused", "refused")
    play.note(
        "refused names and versions",
        versions={version: refused.register(version=version) for version in ("v1alpha", "v1beta2", "")},
        names={name: refused.register(resource_name=name) for name in BAD_NAMES},
        calls=refused.calls,
    )
    play.note("names at the limit", names={name: refused.register(resource_name=name) for name in GOOD_NAMES})

    refused.refusals["GetDevicePluginOptions"] = [Refusal(grpc.StatusCode.INTERNAL, "none today")]
    error = refused.register()
    play.note("options refused", error=error, calls=len(refused.asked("GetDevicePluginOptions")))

    impatient = play.plugin("impatient", "impatient")
    go = threading.Event()
    impatient.on_call["GetDevicePluginOptions"] = go.wait
    failed = bool(impatient.register(timeout_s=0.3))  # it is by chance which side is first to say so
    until(lambda: "GetDevicePluginOptions" in impatient.over)
    go.set()
    del impatient.on_call["GetDevicePluginOptions"]
    again = play.registered(impatient, A)
    play.note(
        "the caller gives up, and registers again",
        failed=failed,
        again=again,
        streams=impatient.streams,
        allocatable=[row for row in play.allocatable() if row[0] == impatient.resource],
    )

    play.note("no listener", error=nobody(), calls=lonely.calls)
    play.note("no listener for a resource that has a plugin", error=missing(), cut_off=forgotten.cut_off)
    frame = [row for row in play.sent(forgotten, A) if row[0] == forgotten.resource]
    play.note("its stream goes on", allocatable=frame)
    forgotten.stop()
    # Nothing tells that kubelet has not noticed; a pod that it sends there does.
    play.create("to-none", forgotten)
    play.note("its end is not noticed", pod=play.settled("to-none"), counts=play.counts(forgotten, (1, 1)))
    error = play.registered(usurper, A, C)
    usurper.end()
    play.note(
        "registering again heals it",
        error=error,
        allocatable=[row for row in play.until_healthy(usurper, ()) if row[0] == usurper.resource],
        counts=play.counts(usurper, (2, 0)),
    )


# --- frames and streams -----------------------------------------------------------------------------------------


def frames(play: Play) -> None:
    """ListAndWatch: each list replaces the one before."""
    plugin = play.plugin("frames", "frames")
    play.registered(plugin, A, B, C)
    _play_frames(
        play,
        plugin,
        ("one unhealthy", (A, sick(B), C), (3, 2)),
        ("shrunk", (C,), (1, 1)),
        ("grown", (A, B, C, Device("d", nodes=(0, 1))), (4, 4)),
        ("another health", (A, Device("b", "Odd"), Device("c", "")), (3, 1)),
        ("empty", (), (0, 0)),
        ("an empty id", (A, Device("")), (2, 2)),
    )


def odd_frames(play: Play) -> None:
    """Lists that no plugin should send."""
    plugin = play.plugin("odd", "odd")
    play.registered(plugin, A)
    _play_frames(
        play,
        plugin,
        ("one twice, unhealthy last", (A, C, sick(C)), (3, 2)),
        ("one twice, healthy last", (A, sick(B), B), (3, 2)),
        ("a topology without nodes", (A, Device("e", nodes=())), (2, 2)),
    )
    plugin.send(A, C, sick(C))
    plugin.end()
    play.note(
        "the end of the stream",
        allocatable=play.until_healthy(plugin, ()),
        counts=play.counts(plugin, (2, 0)),
    )


def _play_frames(play: Play, plugin: Plugin, *steps: tuple[str, tuple[Device, ...], tuple[int, int]]) -> None:
    """Sends each list, and notes what kubelet makes of it."""
    for step, devices, counts in steps:
        allocatable = play.sent(plugin, *devices)
        play.note(
            step,
            allocatable=allocatable,
            file=play.file(),
            counts=play.counts(plugin, counts),
            streams=plugin.streams,
        )


def streams(play: Play) -> None:
    """A stream that ends: in order, by an error, with its plugin."""
    bystander = play.plugin("bystander", "bystander")
    play.registered(bystander, C)
    plugin = play.plugin("streams", "streams")
    endings: Mapping[str, Callable[[], None]] = {
        "in order": plugin.end,
        "by an error": lambda: plugin.end(Refusal(grpc.StatusCode.INTERNAL, "broken")),
        "with the plugin": plugin.stop,
    }
    for step, end in endings.items():
        error = play.registered(plugin, A, B)
        end()
        allocatable = play.until_healthy(plugin, ())
        play.note(
            step,
            error=error,
            allocatable=allocatable,
            counts=play.counts(plugin, (2, 0)),
            registered=play.file()["registered"],
            streams=plugin.streams,
        )
    play.sent(bystander, C, A)
    play.note("the next write of the file", registered=play.file()["registered"])
    play.note(
        "a pod for a plugin that has gone", pod=play.admit("gone", plugin), entries=play.file()["entries"]
    )


def two_plugins(play: Play) -> None:
    """Two plugins register the same resource."""
    older = play.plugin("older", "two")
    play.registered(older, A, B)
    newer = play.plugin("newer", "two")
    error = play.registered(newer, B, C)
    play.note(
        "a second plugin",
        error=error,
        older_cut_off=older.cut_off,
        allocatable=play.allocatable(),
        counts=play.counts(older, (2, 2)),
    )
    play.note("a frame of the older", allocatable=play.sent(older, A), counts=play.counts(older, (1, 1)))
    pod = play.admit("newer", older)
    play.note(
        "a pod",
        pod=pod,
        older=older.asked("Allocate"),
        newer=newer.asked("Allocate"),
        listed=play.until_listed("newer"),
    )
    newer.end()
    allocatable = play.until_healthy(newer, ())
    play.note(
        "the newer goes",
        allocatable=allocatable,
        older_cut_off=older.cut_off,
        counts=play.counts(older, (1, 0)),
        pod=play.settled("newer"),
    )
    play.note(
        "a frame of the older after that",
        allocatable=play.sent(older, A, C),
        counts=play.counts(older, (2, 2)),
        pod=play.admit("stopped", older),
        calls=older.asked("Allocate"),
    )
    healed = play.plugin("healed", "two")
    error = play.registered(healed, A, C)
    older.end()
    cut_off = until(lambda: healed.cut_off)
    play.note(
        "the older ends while another has registered",
        error=error,
        cut_off=cut_off,
        allocatable=play.until_healthy(healed, ()),
    )
    error = play.registered(healed, A, C)
    play.note(
        "registered once more",
        error=error,
        streams=healed.streams,
        allocatable=play.allocatable(),
        pod=play.admit("healed", healed),
        listed=play.until_listed("newer", "healed"),
    )


# --- admission --------------------------------------------------------------------------------------------------


def admission(play: Play) -> None:
    """Pods: preferences, Allocate, the errors of both, and what PodResources and the file say of it."""
    plugin = play.plugin("admission", "admission")
    plugin.prefers = True
    play.registered(plugin, A, B, C, Device("d", nodes=(0, 1)), sick(Device("e")))
    plugin.prefer = lambda ids, size: ["b", "d"]
    during: list[object] = []
    plugin.on_call["Allocate"] = lambda: during.append((play.listed(), play.got("one")))
    play.create("one", plugin, 2)
    pod: PodState | str | None = play.settled("one")
    plugin.on_call.clear()
    uids = {entry["PodUID"] for entry in play.raw_file()["Data"]["PodDeviceEntries"]}
    play.note(
        "a pod of two",
        pod=pod,
        calls=plugin.asked("GetPreferredAllocation", "Allocate", "PreStartContainer"),
        during=during,
        listed=play.listed(),
        got=play.got("one"),
        allocatable=play.allocatable(),
        file=play.file(),
        uids=uids == {play.kubelet.uid(PREFIX + "one")},
        counts=play.counts(plugin, (5, 4)),
    )
    play.note("no such pod", got=play.got("nobody"))

    plugin.calls.clear()
    plugin.refusals["Allocate"] = [Refusal(grpc.StatusCode.FAILED_PRECONDITION, "bound to nvidia")]
    plugin.prefer = lambda ids, size: ["made-up", "b", "a"]
    pod = play.admit("refused", plugin)
    play.note(
        "an error of Allocate",
        pod=pod,
        calls=plugin.asked("GetPreferredAllocation", "Allocate"),
        listed=play.listed(),
        got=play.got("refused"),
        entries=len(play.file()["entries"]),
    )
    plugin.refusals["GetPreferredAllocation"] = [Refusal(grpc.StatusCode.UNAVAILABLE, "no idea")]
    plugin.calls.clear()
    pod = play.admit("no-idea", plugin)
    play.note("an error of GetPreferredAllocation", pod=pod, calls=plugin.asked("Allocate"))

    plugin.calls.clear()
    play.note("more than there are", pod=play.admit("greedy", plugin, 3), calls=plugin.calls)
    plugin.prefer = lambda ids, size: []
    plugin.calls.clear()
    pod = play.admit("rest", plugin, 2)
    play.note(
        "the others, without a preference",
        pod=pod,
        calls=plugin.asked("GetPreferredAllocation", "Allocate"),
        listed=play.listed(),
    )
    play.note("none is left", pod=play.admit("late", plugin))

    nobody = play.plugin("nobody", "nobody")  # never: the node's status keeps a name for ever
    pod = play.run("nobody", nobody)
    play.note("a resource that nobody has registered", pod=pod, listed=play.listed().get("nobody"))
    sickly = play.plugin("sick", "sick")
    play.registered(sickly, A)  # whose arrival can be seen
    play.sent(sickly, sick(A))
    play.note("no healthy device", pod=play.admit("sick", sickly))


def empty_answer(play: Play) -> None:
    """Allocate is answered without a container."""
    plugin = play.plugin("empty", "empty")
    play.registered(plugin, A)
    plugin.containers_answered = 0
    play.note("the answer", pod=play.admit("empty", plugin), listed=play.listed(), got=play.got("empty"))
    plugin.containers_answered = 1
    play.note("the next pod", pod=play.admit("next", plugin), calls=len(plugin.asked("Allocate")))
    other = play.plugin("other", "other")
    play.registered(other, C)
    play.note("another resource", pod=play.admit("other", other))
    play.force_delete("other")
    play.note("after a pod has gone", listed=play.until_listed(), pod=play.admit("last", plugin))


def pre_start(play: Play) -> None:
    """PreStartContainer refuses, and kubelet tries again."""
    plugin = play.plugin("pre-start", "pre-start")
    plugin.pre_start_required = True
    play.registered(plugin, A)
    held = threading.Event()
    plugin.refusals["PreStartContainer"] = [Refusal(grpc.StatusCode.UNAVAILABLE, "still held")]
    during: list[object] = []

    def note() -> None:
        during.append(play.listed())
        held.set()

    plugin.on_call["PreStartContainer"] = note
    play.create("held", plugin)
    until(held.is_set)
    play.note("the first call", calls=plugin.asked("Allocate", "PreStartContainer")[:2], listed=during[:1])
    pod = play.settled("held", "Running")
    play.note("it runs", pod=pod, calls=plugin.asked("PreStartContainer"), listed=play.listed())


def allocated(play: Play) -> None:
    """Devices that a pod has turn Unhealthy, and leave the list."""
    plugin = play.plugin("allocated", "allocated")
    plugin.prefers = True
    play.registered(plugin, A, B)
    play.note("a pod", pod=play.admit("one", plugin))
    allocatable = play.sent(plugin, sick(A), B)
    play.note(
        "its device is unhealthy",
        allocatable=allocatable,
        listed=play.listed(),
        file=play.file(),
        counts=play.counts(plugin, (2, 1)),
    )
    allocatable = play.sent(plugin, B)
    play.note(
        "its device is gone",
        allocatable=allocatable,
        listed=play.listed(),
        file=play.file(),
        counts=play.counts(plugin, (1, 1)),
    )
    plugin.calls.clear()
    play.note(
        "another pod",
        pod=play.admit("two", plugin),
        calls=plugin.asked("GetPreferredAllocation", "Allocate"),
        listed=play.listed(),
    )
    play.note("its device is back", allocatable=play.sent(plugin, A, B), listed=play.listed())
    play.note(
        "both run",
        pods=[play.settled("one"), play.settled("two")],
        none_left=play.admit("three", plugin),
    )


def deletion(play: Play) -> None:
    """Pods go: by force under a living process, and as usual."""
    plugin = play.plugin("deletion", "deletion")
    play.registered(plugin, A)
    play.create("one", plugin, ignores_sigterm=True)
    play.note("a pod", pod=play.settled("one"))
    play.force_delete("one")
    play.note("deleted by force", listed=play.until_listed(), entries=play.file()["entries"])
    play.note("a frame after that", allocatable=play.sent(plugin, A, B), entries=play.file()["entries"])
    play.sent(plugin, A)
    play.note(
        "the next pod has its device",
        pod=play.admit("two", plugin),
        listed=play.until_listed("two"),
        calls=plugin.asked("Allocate"),
        file=play.until_written(),
    )
    play.kubelet.delete(PREFIX + "two")
    listed = play.until_listed()
    play.note("deleted as usual", listed=listed, gone=until(lambda: play.state("two") is None))
    play.note("the device is free", pod=play.admit("three", plugin), listed=play.listed())


# --- restarts ---------------------------------------------------------------------------------------------------


def restart(play: Play) -> None:
    """Kubelet is restarted under a pod that runs."""
    (play.socket_dir / "script-sub").mkdir(exist_ok=True)
    (play.socket_dir / "script-notes").write_text("kept", encoding="utf-8")
    gone = play.plugin("gone", "restart")
    gone.prefers = True
    other = play.plugin("other", "other")
    play.registered(gone, A, B)
    play.registered(other, C)
    play.note("a pod that runs", pod=play.run("runs", gone))
    before = play.file()
    play.kubelet.stop()
    cut_off = until(lambda: gone.cut_off and other.cut_off)
    play.note("kubelet stops", cut_off=cut_off, file=play.file() == before, left=play.sockets())

    again = play.plugin("sub/again", "restart")
    again.prefers = True
    play.kubelet.start()
    play.note(
        "kubelet starts",
        files=play.sockets(),
        allocatable=play.allocatable(),
        streams=(gone.streams, other.streams),
    )
    play.note("it hears of its pods", listed=play.until_listed("runs"))
    play.note("no plugin", counts=play.counts(again, (0, 0)), file=play.file())
    error = play.registered(again, A, B, C)
    play.note(
        "the plugin registers again",
        error=error,
        allocatable=play.allocatable(),
        file=play.file(),
        pod=play.state("runs"),
        calls=again.asked("Allocate", "PreStartContainer"),
        counts=play.counts(again, (3, 3)),
    )
    play.note("a pod after that", pod=play.admit("new", again), listed=play.until_listed("runs", "new"))


def readmission(play: Play) -> None:
    """Kubelet is restarted under a pod whose container does not run."""
    plugin = play.plugin("held", "held")
    plugin.prefers = True
    plugin.pre_start_required = True
    play.registered(plugin, A, B)
    plugin.refusals["PreStartContainer"] = [Refusal(grpc.StatusCode.UNAVAILABLE, "still held")] * 100
    play.note("a pod that is held up", pod=play.run("held", plugin))
    play.restart()
    play.note("no plugin yet", pod=play.settled("held", "Failed"), listed=play.until_listed())
    play.note("it is still known", got=play.got("held"))
    again = play.plugin("again", "held")
    error = play.registered(again, A, B, C)
    play.note(
        "the plugin registers again",
        error=error,
        file=play.file(),
        pod=play.admit("new", again, 3),
        calls=again.asked("Allocate"),
    )


def damaged(play: Play) -> None:
    """Kubelet starts with a ledger's file that it cannot read."""
    plugin = play.plugin("damaged", "damaged")
    plugin.prefers = True
    play.registered(plugin, A, B)
    play.note("a pod", pod=play.run("one", plugin))
    play.kubelet.stop()
    path = play.socket_dir / "kubelet_internal_checkpoint"
    path.write_text(path.read_text(encoding="utf-8")[:-40], encoding="utf-8")
    play.kubelet.start()
    play.note("kubelet starts", listed=play.until_listed("one"), allocatable=play.allocatable())
    again = play.plugin("again", "damaged")
    again.prefers = True
    error = play.registered(again, A, B, C)
    play.note("the plugin registers", error=error, file=play.file(), pod=play.state("one"))
    play.note("its device is given twice", pod=play.admit("two", again), listed=play.listed())


def away(play: Play) -> None:
    """Kubelet is restarted while the API server is away."""
    plugin = play.plugin("away", "away")
    plugin.prefers = True
    play.registered(plugin, A, B)
    play.note("a pod", pod=play.run("one", plugin))
    play.kubelet.lose_api_server()
    play.restart()
    again = play.plugin("again", "away")
    again.prefers = True
    error = play.registered(again, A, B, C)
    play.note(
        "kubelet starts",
        error=error,
        listed=play.listed(),
        got=play.got("one"),
        allocatable=play.allocatable(),
        file=play.file(),
    )
    play.kubelet.find_api_server()
    play.note(
        "the API server is back",
        listed=play.until_listed("one"),
        pod=play.settled("one"),
        file=play.file(),
        calls=again.asked("Allocate"),
    )
    play.note("a pod after that", pod=play.admit("two", again), listed=play.until_listed("one", "two"))


def crash(play: Play) -> None:
    """A device leaves the list while an Allocate that has picked it is in flight: kubelet ends."""
    plugin = play.plugin("crash", "crash")
    play.registered(plugin, A)

    def leave() -> None:
        play.sent(plugin, C)

    plugin.on_call["Allocate"] = leave
    play.create("one", plugin)
    died = until(play.kubelet.died)
    play.note("kubelet ends", died=died, file=play.file())


GROUPS: Final[Mapping[str, Callable[[Play], None]]] = {
    group.__name__: group
    for group in (
        registration,
        frames,
        odd_frames,
        streams,
        two_plugins,
        admission,
        empty_answer,
        pre_start,
        allocated,
        deletion,
        restart,
        readmission,
        damaged,
        away,
        crash,
    )
}
