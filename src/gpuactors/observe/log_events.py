"""Every event name of the log, for operators: its levels and fields, when it is logged, and what to do.

`just log-events` makes docs/log-events.md from `EVENTS`. The calls that log are elsewhere:
tests/observe/test_log_events.py reads them in the source, and compares names, levels and fields with what is declared
here, in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

DEBUG, INFO, WARNING, ERROR = "debug", "info", "warning", "error"


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One row of the table of log events."""

    levels: tuple[str, ...]
    """The levels that it is logged with; with DEBUG beside another one, that is its repetition, or routine."""
    fields: tuple[str, ...]
    """Its own fields, those that it may lack included."""
    when: str
    remedy: str = "Nothing."


FIELDS: Final[Mapping[str, str]] = {
    "reason": "why, as a sentence for people; the words are those of `inspect`, `explain` and the gRPC error",
    "cause": "the [cause](causes.md) of a device's health, or for which a claim waits",
    "causes": "the [causes](causes.md) of a refused call",
    "resource": "the extended resource, `nvidia.com/GH100_H100_SXM5_80GB`",
    "device": "the ID by which kubelet knows the device, as a rule its PCI address",
    "devices": "the devices of a call or of a claim; for `ledger.read` their number in kubelet's ledger",
    "address": "the PCI address of a function",
    "health": "`Healthy` or `Unhealthy`, as kubelet gets it",
    "claim": "the ResourceClaim, `NAMESPACE/NAME`",
    "claims": "the number of claims",
    "uid": "the UID of the ResourceClaim",
    "state": "the [state](dra.md#the-life-of-a-claim) of the claim",
    "call": "the kind of kubelet's call: `Allocate`, `PreStartContainer`",
    "status": "the gRPC status of the answer",
    "label": "the key of the node's label",
    "value": "the value of the node's label, the UID of a ComputeDomain",
    "domain": "the UID of a ComputeDomain",
    "driver": "the name of the DRA driver",
    "device_class": "the name of the DeviceClass",
    "actor": "the name of the part of the daemon",
    "wait_s": "seconds until it is tried again",
    "after_s": "seconds after which it was given up",
    "exception": "the traceback",
    "remedy": "what the daemon does about it",
}
"""What the fields mean that more than one event has, or that do not speak for themselves."""

_DAEMON: Final[Mapping[str, LogEvent]] = {
    "daemon.started": LogEvent(
        (INFO,), ("pid", "kubelet_dir"), "The daemon runs; it has registered nothing yet."
    ),
    "daemon.offers_nothing": LogEvent(
        (WARNING,),
        ("reason",),
        "The settings switch off everything that this daemon could offer. It looks on, and is never ready.",
        "Switch on what it is to offer, or keep it off this node.",
    ),
    "daemon.serving": LogEvent(
        (INFO,),
        ("predecessor",),
        "From now on this daemon is the one that kubelet gets its lists from. `predecessor` says how the one "
        "before ended.",
    ),
    "daemon.handed_over": LogEvent(
        (INFO,), (), "A newer daemon asked for it: the streams end, and the newer one registers."
    ),
    "daemon.successor_lost": LogEvent(
        (WARNING,),
        (),
        "The newer daemon is gone before it served. This one serves again.",
        "See why the newer daemon ended: its last lines are in its pod's status.",
    ),
    "daemon.stopping": LogEvent(
        (INFO,), (), "A stop was asked for: calls in flight are finished, then the streams end."
    ),
    "daemon.stopped_late": LogEvent(
        (WARNING,),
        ("after_s",),
        "Something did not end in time and was cut off.",
        "If it is repeated: report it with the lines before it.",
    ),
    "daemon.gave_up": LogEvent(
        (ERROR,),
        ("reason",),
        "The host, or kubelet's directory, was never there. The daemon ends with exit code 69.",
        "Correct --host-root, --kubelet-dir or the mount that the reason names.",
    ),
    "daemon.died": LogEvent(
        (ERROR,),
        ("exception",),
        "A bug in gpuactors. The daemon ends with exit code 70, and is started again.",
        "Report it with the traceback and the journal.",
    ),
    "actor.failed": LogEvent(
        (ERROR,),
        ("actor", "exception"),
        "A bug in the part of the daemon that serves one resource or one call; the others go on.",
        "Report it with the traceback and the journal.",
    ),
    "actor.restarting": LogEvent(
        (ERROR,),
        ("actor", "wait_s", "exception"),
        "A bug in one part of the daemon, which is started again.",
        "Report it with the traceback and the journal.",
    ),
    "actor.waiting": LogEvent(
        (WARNING,),
        ("actor", "wait_s", "reason"),
        "One part of the daemon lacks descriptors, memory or threads, and tries again.",
        "Raise the limit that the reason names.",
    ),
    "signal.received": LogEvent((INFO,), ("signal",), "The daemon was told to stop."),
    "signal.ignored": LogEvent(
        (INFO,), ("signal", "reason"), "A signal that has no meaning to the daemon (SIGUSR1, SIGUSR2)."
    ),
    "library.logged": LogEvent(
        (DEBUG, INFO, WARNING, ERROR),
        ("logger", "message", "exception"),
        "What a library said, or our gRPC layer about a peer's connection: `message` has its words.",
        "At error: report it.",
    ),
}

_HOST: Final[Mapping[str, LogEvent]] = {
    "host.scanned": LogEvent(
        (INFO, DEBUG),
        ("functions",),
        "The whole PCI bus was read, with so many functions. INFO the first time.",
    ),
    "host.short": LogEvent(
        (WARNING,),
        ("reason",),
        "The daemon lacks descriptors, memory or threads to see who uses a GPU.",
        "Raise that limit of the daemon's container.",
    ),
    "scan.failed": LogEvent(
        (ERROR,),
        ("reason",),
        "The PCI bus cannot be read. What was known stays, and it is tried again.",
        "See the reason: as a rule the mount of the host's /sys is missing, or --host-root is wrong.",
    ),
    "inspection.failed": LogEvent(
        (WARNING, DEBUG),
        ("address", "reason"),
        "One function could not be inspected. A GPU that is affected is Unhealthy, or stays as it was for "
        "want of descriptors.",
        "See the reason. For a driver that hangs see dmesg.",
    ),
    "function.unreadable": LogEvent(
        (WARNING,),
        ("address", "reason"),
        "A file of this function in sysfs cannot be read, so it may be a GPU that no list can show.",
        "See the reason: it names the file.",
    ),
    "uevents.opened": LogEvent((INFO,), (), "The kernel's uevents are received."),
    "uevents.lost": LogEvent(
        (WARNING,),
        ("reason", "remedy"),
        "The kernel dropped uevents, as there were more than its buffer holds. Everything is read anew.",
    ),
    "uevents.unavailable": LogEvent(
        (WARNING, DEBUG),
        ("reason", "remedy"),
        "No uevents are received; the whole host is scanned every 10 s instead, so a change is seen later.",
        "Run the pod without `hostUsers: false`; nothing if --uevents off is meant.",
    ),
    "uevent.ignored": LogEvent(
        (DEBUG,),
        ("reason", "port", "start", "devpath"),
        "A message on the socket of uevents that is no uevent of the kernel, or names no PCI function.",
    ),
    "holders.unavailable": LogEvent(
        (WARNING,),
        ("reason",),
        "What --holders asks for is not there: GPUs in use are detected by sysfs only.",
        "Give the container what the reason names (deploy/overlays/holders-proc), or --holders passive.",
    ),
    "holders.available": LogEvent((INFO,), (), "What was missing for --holders is there again."),
}

_KUBELET: Final[Mapping[str, LogEvent]] = {
    "kubelet.appeared": LogEvent(
        (INFO,), (), "Kubelet's socket is there, or is a new one: each resource registers."
    ),
    "kubelet.gone": LogEvent(
        (WARNING,),
        ("reason",),
        "Kubelet's socket is not there. Nothing is offered until it is back.",
        "Nothing during a restart of kubelet. If it lasts: see the reason. Where kubelet's directory was "
        "made anew, delete the pod.",
    ),
    "plugin.registered": LogEvent(
        (INFO,), ("resource",), "Kubelet has accepted the resource and holds its stream open."
    ),
    "plugin.unregistered": LogEvent(
        (WARNING, DEBUG),
        ("resource", "reason"),
        "Kubelet does not serve the resource from our list. It is registered again; DEBUG is a step of that.",
        "Nothing at a restart of kubelet. If it is repeated: see the reason, and kubelet's own log.",
    ),
    "plugin.contested": LogEvent(
        (WARNING,),
        ("resource", "reason"),
        "Kubelet has another plugin's devices under our resource's name. The name is taken back, ever more seldom.",
        "Let only one plugin serve this name on the node: [which ones collide](gpu-operator.md).",
    ),
    "ledger.read": LogEvent(
        (INFO, DEBUG),
        ("source", "devices", "claims"),
        "Kubelet said which pod has which device. `source` is PodResources, or kubelet's file "
        "`kubelet_internal_checkpoint`. "
        "DEBUG if nothing changed.",
        "If `source` is the file: mount `/var/lib/kubelet/pod-resources`, as a pod's end is seen late from the file.",
    ),
    "ledger.unreadable": LogEvent(
        (WARNING, DEBUG),
        ("reason",),
        "Kubelet did not say who has which device. Its last answer stays; a GPU that is open then is `HolderUnknown`.",
        "Nothing at a restart of kubelet. If it lasts: see the mounts, and whether kubelet hangs.",
    ),
    "ledger.damaged": LogEvent(
        (WARNING,),
        ("reason",),
        "A part of kubelet's file makes no sense. The rest of it counts.",
        "See the reason. Kubelet writes the file anew with its next allocation.",
    ),
    "resource.appeared": LogEvent(
        (INFO,),
        ("resource",),
        "A model that was not there before: a resource of its own, which registers now.",
    ),
    "resource.retired": LogEvent(
        (INFO,),
        ("resource",),
        "The last device of a resource is gone and no pod has one: its name is given up.",
    ),
    "resource.contested": LogEvent(
        (WARNING,),
        ("resource", "device_class", "reason"),
        "At the start, once for each such class: a DeviceClass has a resource of the device plugin as its "
        "`extendedResourceName`, so one GPU may be counted twice.",
        "See [both APIs on one node](dra.md#both-apis-on-one-node); `gpuactors doctor` looks again.",
    ),
    "classes.unread": LogEvent(
        (INFO,),
        ("reason",),
        "The API server does not say which DeviceClasses there are, so none is compared with our resources.",
        "Grant `list` of deviceclasses, as deploy/overlays/dra does. Nothing else depends on it.",
    ),
    "device.changed": LogEvent(
        (INFO, WARNING),
        ("resource", "device", "health", "cause", "reason"),
        "A device is new, or its health or the reason for it is another one. WARNING if it is Unhealthy "
        "without a claim of ours.",
        "See the [cause](causes.md).",
    ),
    "device.gone": LogEvent(
        (INFO,),
        ("resource", "device", "cause", "reason"),
        "A device has left the list of its resource.",
        "See the [cause](causes.md).",
    ),
    "devices.unknown": LogEvent(
        (WARNING,),
        ("resource", "count", "reason"),
        "Kubelet's ledger has so many more IDs that mean no function of this node; the first ones had lines "
        "of their own.",
        "Find the pods, and the plugin that served this resource before.",
    ),
    "rule.broken": LogEvent(
        (ERROR,),
        ("resource", "device", "reason"),
        "A bug in gpuactors: the device is set aside as Unhealthy, and the rest is served.",
        "Report it with the journal.",
    ),
    "call.granted": LogEvent(
        (INFO,), ("call", "resource", "devices"), "Kubelet's call got what it asked for."
    ),
    "call.refused": LogEvent(
        (WARNING,),
        ("call", "resource", "devices", "status", "causes", "reason"),
        "Kubelet's call was refused. After an Allocate the pod fails with this reason, and its controller "
        "makes another; "
        "a PreStartContainer is tried again by kubelet.",
        "See the [causes](causes.md).",
    ),
}

_CLAIM: Final = ("claim", "uid", "devices")

_CLAIMS: Final[Mapping[str, LogEvent]] = {
    "claims.serving": LogEvent((INFO,), ("driver", "sockets"), "The sockets of the DRA driver are there."),
    "claims.registered": LogEvent((INFO,), (), "Kubelet has accepted the DRA driver."),
    "claims.unregistered": LogEvent(
        (WARNING,),
        ("reason",),
        "Kubelet has refused the DRA driver, in its own words.",
        "See the reason. Another driver with the same name is one: --driver-name.",
    ),
    "claims.unserved": LogEvent(
        (WARNING, ERROR, DEBUG),
        ("reason",),
        "No claim is served: the sockets cannot be made, or the checkpoint is a newer daemon's or cannot be "
        "read. Nothing is touched.",
        "See the reason; for a newer daemon's checkpoint start that one again.",
    ),
    "claims.dead_socket_removed": LogEvent(
        (INFO,), ("path", "reason"), "A socket that a killed pod had left in kubelet's registry was removed."
    ),
    "claim.waiting": LogEvent(
        (INFO, DEBUG),
        (*_CLAIM, "cause", "reason"),
        "A prepare waits in its call for whoever has its device, or for its compute domain. DEBUG if that is no owner.",
        "Nothing at first. After 35 s it is refused with this reason.",
    ),
    "claim.reserved": LogEvent((INFO,), _CLAIM, "The devices are the claim's own from now on."),
    "claim.prepared": LogEvent((INFO,), _CLAIM, "The claim's containers may start."),
    "claim.unprepared": LogEvent((INFO,), _CLAIM, "The claim has ended, and its devices are returned."),
    "claim.refused": LogEvent(
        (WARNING,),
        ("uid", "claim", "causes", "reason"),
        "A prepare or unprepare was answered with an error. Kubelet tries again, a prepare after 60 to 90 s.",
        "See the [errors of claims](dra.md#errors-and-what-to-do).",
    ),
    "claim.passed_on": LogEvent(
        (INFO,),
        ("uid", "claim"),
        "A prepare or unprepare has come to a daemon that has handed over: its successor is asked, and kubelet gets "
        "that answer.",
    ),
    "claim.act_failed": LogEvent(
        (WARNING, DEBUG),
        ("claim", "uid", "state", "reason"),
        "A bind, an unbind or a file of the claim did not succeed. The devices stay as they are; a release "
        "is tried again every 5 s.",
        "See the [errors of claims](dra.md#errors-and-what-to-do).",
    ),
    "device.unclaimable": LogEvent(
        (WARNING, DEBUG),
        ("address", "cause", "reason"),
        "A GPU on its host's driver could not be bound for a claim now, and is not offered to claims: it has a taint, "
        "or is withdrawn.",
        "See the reason: it says what to do. It is offered again within 15 s after that.",
    ),
    "device.claimable": LogEvent((INFO,), ("address",), "A claim could bind it again."),
    "claim.return_owed": LogEvent(
        (WARNING, DEBUG),
        (*_CLAIM, "reason"),
        "The claim has ended, and a GPU of it stays on vfio, as the driver that it is to be returned to is not loaded. "
        "It may be claimed again. Its return is tried every 15 s.",
        "Load that driver on the host, if the GPU is to go back to it.",
    ),
    "claim.return_done": LogEvent(
        (INFO,),
        _CLAIM,
        "The GPU of a claim that has ended is on its driver again, which was not loaded before.",
    ),
    "claim.astray": LogEvent(
        (WARNING,),
        (*_CLAIM, "reason"),
        "A prepared claim's device was not where its files say, and is bound again.",
        "Find out who has bound it elsewhere.",
    ),
    "claim.collected": LogEvent(
        (WARNING,),
        ("claim", "uid", "reason"),
        "The API server has no such claim, said so twice, and kubelet never unprepared it: its devices are returned.",
    ),
    "claim.broken": LogEvent(
        (ERROR,),
        ("uid", "claim", "reason"),
        "A bug in gpuactors: the claim is left as it is, the others go on.",
        "Report it with the journal. Deleting its pod is another try.",
    ),
    "checkpoint.read": LogEvent(
        (INFO, WARNING),
        ("claims", "reason"),
        "The claims on this node's disk were read. WARNING, with a reason, if the checkpoint was lost or "
        "made no sense.",
        "See [what happens then](dra.md#when-something-ends-or-is-away).",
    ),
    "checkpoint.unwritten": LogEvent(
        (ERROR, DEBUG),
        ("reason",),
        "The checkpoint cannot be written, so no claim is prepared or released.",
        "Free the disk of kubelet's `plugins` directory, or make it writable.",
    ),
    "checkpoint.written": LogEvent((INFO,), (), "The checkpoint can be written again."),
    "slices.published": LogEvent(
        (INFO,),
        ("slices", "tainted", "withdrawn", "keeps_taints"),
        "The API server's ResourceSlices are what this node offers: which devices are tainted, and which "
        "ones left out.",
    ),
    "slices.unpublished": LogEvent(
        (WARNING, DEBUG),
        ("reason",),
        "The ResourceSlices cannot be written; they are tried again.",
        "See the reason: the API server, its address, or the rights of deploy/overlays/dra.",
    ),
    "module.loaded": LogEvent(
        (INFO,), ("device", "driver"), "The vfio driver of a claim's GPU was loaded (`--load-modules on`)."
    ),
    "persistence.set": LogEvent(
        (INFO,), ("device", "on"), "nvidia-persistenced let go of a GPU for a claim, or took it again."
    ),
    "persistence.failed": LogEvent(
        (WARNING,),
        ("device", "on", "reason"),
        "nvidia-persistenced refused. A GPU that it keeps open makes its claim wait.",
        "See its log on the host, and whether its socket is mounted.",
    ),
}

_DOMAINS: Final[Mapping[str, LogEvent]] = {
    "imex.read": LogEvent(
        (INFO, WARNING),
        ("clique", "source", "reason"),
        "What the host's driver says of IMEX, or why the node has none.",
        "With a reason, see [the host](compute-domains.md#what-the-host-says).",
    ),
    "imex.unreadable": LogEvent(
        (WARNING, DEBUG),
        ("reason",),
        "The host's files about IMEX cannot be read.",
        "See the reason: as a rule the mount of the host's /proc.",
    ),
    "label.added": LogEvent(
        (INFO,), ("label", "value"), "The node has the label, by which NVIDIA's controller starts the daemon."
    ),
    "label.removed": LogEvent((INFO,), ("label", "value"), "No claim needs the label any more."),
    "label.conflicted": LogEvent(
        (INFO,), ("label", "reason"), "Somebody else was quicker: the label is read and decided on anew."
    ),
    "label.foreign": LogEvent(
        (WARNING,),
        ("label", "value"),
        "The node has a value of the label that no claim here has set. It is not overwritten.",
        "Whoever set it must remove it: `kubectl label node NAME resource.nvidia.com/computeDomain-`",
    ),
    "label.failed": LogEvent(
        (WARNING, DEBUG),
        ("label", "reason"),
        "The label could not be changed; it is tried again.",
        "See the reason: the API server, or the rights of deploy/overlays/compute-domains.",
    ),
    "domain.unreadable": LogEvent(
        (WARNING, DEBUG),
        ("domain", "reason"),
        "The API server did not answer about a ComputeDomain; claims for it wait.",
        "See the reason: the API server, the rights, or NVIDIA's definitions are missing.",
    ),
    "domains.unwatched": LogEvent(
        (WARNING,),
        ("reason",),
        "The API server's watch of the ComputeDomains cannot be opened, or broke off; it is tried again.",
        "If it is repeated: see the reason. It is the API server, or the rights of deploy/overlays/compute-domains.",
    ),
    "node.unwatched": LogEvent(
        (WARNING,),
        ("reason",),
        "The API server's watch of our own Node cannot be opened, or broke off; it is tried again.",
        "If it is repeated: see the reason. It is the API server, or the rights of deploy/overlays/compute-domains.",
    ),
}

_TOLD: Final[Mapping[str, LogEvent]] = {
    "events.unposted": LogEvent(
        (WARNING,),
        ("reason",),
        "A Kubernetes Event could not be posted; said once while that lasts. It is tried again while it holds.",
        "See the reason: the API server, its address, or the rights of deploy/overlays/events.",
    ),
    "features.unwritten": LogEvent(
        (WARNING,),
        ("reason",),
        "The file for Node Feature Discovery cannot be written; it is tried again every minute.",
        "Mount the directory of --nfd-file, writable; deploy/overlays/node-features does.",
    ),
}

_FILES: Final[Mapping[str, LogEvent]] = {
    "control.unavailable": LogEvent(
        (WARNING,),
        ("reason",),
        "There is no control socket: no hand-over without a gap, and `inspect` and `explain` cannot ask the daemon.",
        "Make --state-dir writable, and its path shorter if the reason says so.",
    ),
    "served.unkept": LogEvent(
        (WARNING,),
        ("reason",),
        "`served.json` cannot be read or written: after another --select, a running pod's GPU may lose its old name.",
        "Make --state-dir writable.",
    ),
    "journal.failed": LogEvent(
        (WARNING,),
        ("reason",),
        "The journal cannot be written. The daemon works without it, and tries again every 30 s.",
        "Free the disk, or give another --state-dir.",
    ),
    "journal.resumed": LogEvent((INFO,), ("directory",), "The journal is written again."),
    "journal.dropped": LogEvent(
        (WARNING,),
        ("reason",),
        "The disk is slower than the events: the journal has a gap, which `replay` says.",
        "Put --state-dir on a faster disk.",
    ),
    "http.listening": LogEvent((INFO,), ("address",), "Probes and metrics are served there."),
    "http.unavailable": LogEvent(
        (WARNING,),
        ("reason",),
        "Probes and metrics cannot be served; it is tried again.",
        "See the reason: as a rule the address of --http-address is taken.",
    ),
    "http.crowded": LogEvent(
        (WARNING,),
        ("closed",),
        "So many connections to the HTTP endpoints were closed without an answer since the last such line: all places "
        "were taken, as a rule by clients that open a connection and send or take nothing. Probes are answered "
        "nevertheless.",
        "Find out who connects to the port of --http-address, and keep it away: the NetworkPolicy of the base lets "
        "in the monitoring namespace only.",
    ),
}

GROUPS: Final[Mapping[str, Mapping[str, LogEvent]]] = {
    "The daemon": _DAEMON,
    "The host": _HOST,
    "Kubelet and the device plugin": _KUBELET,
    "Claims": _CLAIMS,
    "Compute domains": _DOMAINS,
    "Files and endpoints": _FILES,
    "Kubernetes Events and node features": _TOLD,
}
"""Every event, in the order of the document."""

EVENTS: Final[Mapping[str, LogEvent]] = {
    name: event for group in GROUPS.values() for name, event in group.items()
}

_HEAD: Final = """\
# Log events

Made by `just log-events` from `src/gpuactors/observe/log_events.py`: change it there.

The log is one line per event on standard error, JSON as a rule (`--log-format console` for people). Every line has
`timestamp`, `level`, `event` and `node`; the table has the other fields. Event names, levels and fields are for
programs; the sentence in `reason` is for people, and may change.

Where a level is followed by `debug`, that is for what is routine, or the same again. A line at `warning` says that
something is missing, or was refused; at `error` it is a bug, or claims or the host's devices cannot be served.
`kubectl logs POD | jq -c 'select(.level == "warning" or .level == "error")'` shows both.
"""


def document() -> str:
    """docs/log-events.md: every event with its meaning."""
    lines = [_HEAD]
    for heading, group in GROUPS.items():
        rows = (_row(name, event) for name, event in group.items())
        head = ("| Event | Level | Fields | When | What to do |", "|---|---|---|---|---|")
        lines += [f"## {heading}", "", *head, *rows, ""]
    fields = (f"| `{name}` | {meaning} |" for name, meaning in FIELDS.items())
    return "\n".join([*lines, "## Fields", "", "| Field | Meaning |", "|---|---|", *fields, ""])


def _row(name: str, event: LogEvent) -> str:
    fields = ", ".join(f"`{field}`" for field in event.fields)
    return f"| `{name}` | {', '.join(event.levels)} | {fields} | {event.when} | {event.remedy} |"


if __name__ == "__main__":
    print(document(), end="")
