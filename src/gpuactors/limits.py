"""The bounds that several files share, or that are asserted against another one: name, unit and the reason for the
number.

A bound that one file uses is at its head; those of gRPC are in `grpc_trio/limits.py`. Must not hold settings: those are
in `config/settings.py`. Bounds follow from kubelet, the kernel or arithmetic, and a change needs a reason, not a
preference.
"""

from __future__ import annotations

from typing import Final

# --- the registry and the host -------------------------------------------------------------------------

INBOX_EVENTS: Final = 256
"""Events that may wait for the registry. Worst case: one uevent burst of a 16-GPU node (16 × 3 events) plus one
call in flight per GPU plus a scan result; a full inbox makes the producers wait, never the registry."""

INSPECTION_DEADLINE_S: Final = 5.0
"""One inspection of a function and its IOMMU group. A healthy inspection takes about 0.2 ms; a sysfs read that hangs
(kernel 6.1 while an unbind waits for its holder) hangs for ever, so the number only has to be far from both."""

SCAN_DEADLINE_S: Final = 60.0
"""A full scan. 4,096 functions take well under a second; as above."""

# --- kubelet's calls and registrations -----------------------------------------------------------------

SOCKET_PATH_MAX_BYTES: Final = 107
"""sockaddr_un.sun_path is 108 bytes with its terminating NUL (linux/un.h)."""

CALL_DEADLINE_S: Final = 12.0
"""A device plugin call in the daemon, from request to answer. Kubelet sets none for Allocate; PreStartContainer has
30 s. Longer than two INSPECTION_DEADLINE_S, and than two LEDGER_DEADLINE_S: an inspection or a read that hangs may be
outstanding already, and the call needs one after it."""

CALL_DEVICES_MAX: Final = 1024
"""Devices, and containers, in one device plugin call: kubelet names every available device of the resource in
GetPreferredAllocation, and the largest node has 16."""

DISCONNECT_WAIT_S: Final = 0.1
"""Before Register: how long to wait until kubelet has closed its connection to our old stream, the sign that it has
noticed the end (seen: 0.6 ms). Another client's open connection must not delay a registration further."""

SERVE_BACKOFF_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Waits between attempts to make our own socket (full or read-only directory, another process on it)."""

RETIRE_EMPTY_AFTER_S: Final = 600.0
"""An emptied resource keeps its plugin this long: a rebind is answered at once, and kubelet removes an endpoint
whose stream ended only after 300 s."""

DRAIN_S: Final = 2.0
"""On stopping: calls in flight may finish for so long, then streams end. An Allocate takes about a millisecond."""

# --- kubelet's ledger and the use of the groups --------------------------------------------------------

POLL_DEADLINE_S: Final = 10.0
"""One poll. `enable` and `power/runtime_status` never block; a scan of /proc of a large node takes a second or two."""

LEDGER_S: Final = 5.0
"""How often kubelet's ledger is read, without List, while it lists any device of gpuactors: how late a forced deletion
is noticed, after which the old process runs on without any event."""

GRANT_FILE_S: Final = 10.0
"""From the answer to an Allocate until kubelet is taken to be done with it, if its file does not show the device: the
file is written when the container has the devices of all resources, and another plugin may be slow. Seen: 4.5 s."""

LEDGER_QUIET_S: Final = 30.0
"""How often kubelet's ledger is read while it lists no device of gpuactors: how late it is noticed that a DRA driver,
or another plugin under its own name, has allocated one of its GPUs. No Allocate waits for that, as each has a read of
its own."""

LEDGER_FRESH_S: Final = 0.1
"""A read of the ledger that was requested at most so long before a call counts for it as if it came after, unless the
call would be refused by it: a burst of calls costs 10 reads a second, of the 100 that kubelet allows all its
clients."""

LEDGER_RETRY_S: Final = 5.0
"""After a failed read of kubelet's ledger; kubelet's appearing leads to a read at once."""

LEDGER_DEADLINE_S: Final = 5.0
"""One read of kubelet's ledger, PodResources and the file."""

CHECKPOINT_DEADLINE_S: Final = 1.0
"""One read of kubelet's ledger file beside List: a disk that hangs delays a call by this much."""

assert CHECKPOINT_DEADLINE_S < LEDGER_DEADLINE_S

assert 2 * max(INSPECTION_DEADLINE_S, LEDGER_DEADLINE_S) < CALL_DEADLINE_S

KUBELET_LIST_AGAIN_S: Final = 2.0
"""After a read with another list than ours: when it is read again. One difference may be a device list that kubelet was
slow to process; two are another plugin's list, or no plugin's."""

ODD_SIGHT_S: Final = 1.0
"""After another process's socket appeared beside kubelet's, or a stream ended that was not taken for kubelet's: when
kubelet's list is read. A plugin registers as soon as its socket is there. They lead to one read in this time, however
many there are."""

CONTEND_BACKOFF_S: Final = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0)
"""From the second read with another list than ours until we register again, by the number of registrations without
success; the last one repeats. A plugin that answers each of our registrations with its own makes all GPUs of the node
Unhealthy for some milliseconds each time, and pods that meet two plugins: hence the growing intervals."""

CONTENTION_OVER_S: Final = 600.0
"""The lists have agreed for so long: the other plugin no longer registers, and the next contention begins with the
first wait again. As long as the longest wait, so that a contention never seems over before its next round."""

assert CONTEND_BACKOFF_S[-1] <= CONTENTION_OVER_S

FOREIGN_SOCKETS_MAX: Final = 16
"""Other plugins' sockets that are named to the operator; a node has a handful."""

LEDGER_SETTLE_S: Final = 30.0
"""After its start kubelet answers List before it knows its pods (kubernetes #112119 for the same list over HTTP), and
as long as the API server is away: until it has known them for so long, the entries of its ledger file count as well,
unless this kubelet has listed them before. More costs little: ended entries of the file count for longer."""

LEDGER_CALLED_S: Final = 2.0
"""The same after kubelet has asked for a claim of a pod, where the pod is older than kubelet's start: it takes over all
pods of the API server in one piece, oldest first, and asks while it does so."""

assert LEDGER_CALLED_S < LEDGER_SETTLE_S

GRANT_GRACE_S: Final = 30.0
"""How long a device that Allocate granted counts as allocated while kubelet cannot confirm it: its ledger cannot be
read, or it restarts at that moment and does not know its pods yet."""

GRANT_LEDGER_S: Final = 0.5
"""When kubelet's ledger is read after an Allocate was answered. Seen: kubelet lists it as soon as it has the answer,
before PreStartContainer; so a device that is missing in a read requested later than this is not allocated."""

assert GRANT_LEDGER_S < GRANT_FILE_S < GRANT_GRACE_S

# --- the control socket --------------------------------------------------------------------------------

HAND_OVER_DEADLINE_S: Final = 5.0
"""How long a successor waits for the running daemon to end its streams before it takes over anyway. More than the
longest orderly end: see below."""

LATE_CALL_S: Final = 0.4
"""An Allocate that comes after the hand-over has begun, from request to answer: milliseconds, as any. They are taken
for so long, if there is always one in flight."""

# Calls in flight, late ones and the last of these, the streams' last device lists, and kubelet's end of the connection.
assert DRAIN_S + 2 * LATE_CALL_S + DRAIN_S + DISCONNECT_WAIT_S < HAND_OVER_DEADLINE_S

HAND_OVER_RETRY_S: Final = 0.05
"""How often the running daemon is asked while it hands over to another successor or is just ending: milliseconds."""

CONTROL_CONNECT_S: Final = 1.0
"""How long a command waits for a place in the queue of the control socket; a daemon that runs takes each at once."""

CONTROL_CALL_S: Final = 2.0
"""One reading of the running daemon's state by a command; it takes milliseconds."""

WATCH_BEAT_S: Final = 5.0
"""Interval without a change after which a command that watches gets a sign of life: a daemon that hangs, or whose
process is stopped, keeps its connections."""

KUBELET_DIR_RETRY_S: Final = 1.0
"""How often to check for kubelet's device-plugins directory while it does not exist (inotify needs it to)."""

# --- the API server ------------------------------------------------------------------------------------

API_HOUR_JITTER: Final = 0.25
"""The share by which what is asked once an hour is earlier or later, each time another one: all watches of a cluster
begin within seconds after an outage of the API server, and would all be renewed within the same seconds of each hour
after it."""

EVENT_SETTLE_S: Final = 10.0
"""Minimum duration of a fact that is posted: not of a process that ends with its pod, or of a claim that waits for
the one before it."""

EVENT_AGAIN_S: Final = 300.0
"""Minimum interval before a fact is posted again that went and came back, or that the API server has refused."""

EVENT_REPEAT_S: Final = 1800.0
"""Interval at which a lasting fact is posted again: client-go's own for a series that goes on."""

EVENT_TTL_S: Final = 3600.0
"""The API server forgets an event so long after its last change (kube-apiserver --event-ttl)."""

assert EVENT_SETTLE_S < EVENT_AGAIN_S < EVENT_REPEAT_S < EVENT_TTL_S

# --- texts, files and sockets --------------------------------------------------------------------------

QUOTED_ITEMS_MAX: Final = 16
"""Devices that are named in one sentence or field of the log: GPUs of the largest node. Of more only the number is
given."""

QUOTED_NAME_CHARS_MAX: Final = 253
"""Characters of a pod's, namespace's, claim's or resource's name in a sentence: as many as Kubernetes allows."""

LOG_TEXT_MAX_CHARS: Final = 8192
"""One string in a line of the log, except tracebacks: a refusal of QUOTED_ITEMS_MAX devices with a reason each."""

JOURNAL_MAX_BYTES: Final = 64 * 1024 * 1024
"""All files of the journal together; the oldest are removed. A month of a quiet node with 8 GPUs: enough to have
last weekend's incident on Monday, and nothing to a disk that holds container images."""

DIAL_OWN_S: Final = 0.8
"""How long one of our own sockets may take to answer the liveness probe; kubelet gives a probe 1 s by default."""

KUBELET_CONNECT_DEADLINE_S: Final = 5.0
"""Connecting to kubelet.sock: at once, or kubelet is not accepting."""

# --- claims (DRA) --------------------------------------------------------------------------------------

CLAIM_ANSWER_S: Final = 35.0
"""35 s. A prepare or unprepare is answered within it: kubelet's deadline is 45 s, after which a user sees only
DeadlineExceeded, and a failed prepare is repeated only after 60 to 90 s (kubernetes issue 139836)."""

CLAIMS_FILE_MAX_BYTES: Final = 16 * 1024 * 1024
"""The checkpoint of the claims, and one CDI or metadata file: some kilobytes. Something else by that name must not be
read for ever."""

SYSFS_WRITE_DEADLINE_S: Final = 20.0
"""One write to sysfs. A GPU's unbind and its reset take seconds (NVIDIA's driver 2 to 5 s with 80 GB); a driver that
waits for its last user waits for ever. After it the child process waits alone, and holds the lock of the group."""

ACT_DEADLINE_S: Final = 30.0
"""One act on a GPU and its companions: kubelet's call is answered within 35 s, with the cause."""

assert SYSFS_WRITE_DEADLINE_S < ACT_DEADLINE_S < CLAIM_ANSWER_S

IMEX_CHANNELS_MAX: Final = 2048
"""Channels of a node: NVIDIA's driver makes no more (NVreg_ImexChannelCount)."""

CDI_SPECS_MAX: Final = 4096
"""Files of the CDI directory that are looked at for a device of somebody else's."""

CDI_SPEC_MAX_BYTES: Final = 1048576
"""1 MiB. Of each: that of NVIDIA's toolkit has some 20 KiB."""

FILES_DEADLINE_S: Final = 10.0
"""Writing or removing the files of a claim, or the checkpoint: milliseconds, and two syncs of a disk that is busy."""

STATE_LOCK_WAIT_S: Final = 5.0
"""5 s. A write or read of the claims' state waits so long for that of another daemon, two syncs; then it says who
writes. Less than FILES_DEADLINE_S, so that this is said and not that the disk does not answer."""

assert STATE_LOCK_WAIT_S < FILES_DEADLINE_S

CLAIM_READ_RETRY_S: Final = 2.0
"""2 s. After a failed read of a claim from the API server while its prepare waits."""

CLAIM_RETRY_S: Final = 5.0
"""5 s. After a failed act that is tried again by itself: a release, or files that must be there."""

CLAIM_COLLECT_S: Final = 60.0
"""60 s. A prepared claim that kubelet lists for no pod is looked for at the API server after this time, and again after
it; after two answers that it does not exist it is released (kubernetes issues 139845, 139876)."""

CLAIM_CALL_S: Final = 40.0
"""40 s. An answer that the core owes for so long is answered by the gRPC service itself: below kubelet's 45 s, above
CLAIM_ANSWER_S with room for a registry that is busy."""

assert CLAIM_ANSWER_S < CLAIM_CALL_S

DEREGISTERED_S: Final = 1.5
"""1.5 s. How long a plugin whose registration socket is gone still answers, unless kubelet disconnects: kubelet sees
the removal at once and acts on it each second (pluginmanager/reconciler), and a prepare that is refused in between is
tried again only after 60 s."""

RELAY_S: Final = 20.0
"""20 s. A daemon that has handed over its claims keeps its sockets for so long, and passes on what kubelet still asks
of it. Kubelet's plugin watcher registers the successor after 0.1 to 1 s (seen), and after 17.6 s if the first GetInfo
was late; without the one and the other a pod starts 60 to 90 s late."""

STOP_HANDED_OVER_S: Final = 50.0
"""50 s. From SIGTERM to the end of a process that has handed over its claims, at the latest: the prepares in its hands
have up to CLAIM_CALL_S, and it passes calls on for RELAY_S. Kubernetes kills it after 60 s
(`terminationGracePeriodSeconds` where claims are served)."""

assert RELAY_S + DEREGISTERED_S < CLAIM_CALL_S + DEREGISTERED_S < STOP_HANDED_OVER_S
