"""Every bound of the program, in one place, but for those of gRPC itself (`grpc_trio/limits.py`): name, unit and the
reason for the number.

Must not hold settings: those are in `config/settings.py`. These bounds follow from kubelet, the kernel or arithmetic,
and a change needs a reason, not a preference.
"""

from __future__ import annotations

from typing import Final

# --- channels ---------------------------------------------------------------------------------------------

INBOX_EVENTS: Final = 256
"""Events that may wait for the registry. Worst case: one uevent burst of a 16-GPU node (16 × 3 events) plus one
call in flight per GPU plus a scan result; a full inbox makes the producers wait, never the registry."""

REGISTRY_EVENTS: Final = 16
"""Events that the registry takes in one turn of the loop, at a millisecond each on the largest node."""

# --- reading the host -------------------------------------------------------------------------------------

INSPECTION_DEADLINE_S: Final = 5.0
"""One inspection of a function and its IOMMU group. A healthy inspection takes about 0.2 ms; a sysfs read that hangs
(kernel 6.1 while an unbind waits for its holder) hangs for ever, so the number only has to be far from both."""

SCAN_DEADLINE_S: Final = 60.0
"""A full scan. 4,096 functions take well under a second; as above."""

SCAN_FUNCTION_S: Final = 1.0
"""After so long at one function (at most twice as long) a scan is made anew without it: until the first one is there no
GPU is served. A read takes microseconds; on a node that is starved of processor time no function is to be at fault."""

SCANS_HANGING_MAX: Final = 64
"""Scans whose threads hang, each at another function: more functions that do not answer are a host that does not."""

INSPECTION_BATCH: Final = 64
"""Functions that are inspected one after the other in one thread; the others follow in the next. Takes some 15 ms, for
which an Allocate may have to wait; it is more than the devices of any call."""

INSPECTION_STALL_S: Final = 0.1
"""After so long at one function (at most twice as long) those after it are inspected without it. A function takes 0.2
ms; on a node that is starved of processor time nothing is lost but that each is inspected by itself."""

INSPECTION_CONCURRENCY: Final = 16
"""Inspections of one function each that run side by side; the others wait in a queue, in order. One that hangs leaves
it after INSPECTION_STALL_S: 256 of them hold up the last one by 1.6 s. 16 = GPUs of the largest node."""

UNSETTLED_INSPECTIONS_S: Final = (0.2, 1.0, 5.0, 30.0)
"""When to repeat an inspection of a function that failed or was incomplete (a missing node, an unreadable attribute);
the last one repeats. udev's own rules finish in well under a second."""

SHORTAGE_INSPECTION_S: Final = 1.0
"""How long after an inspection that failed for want of descriptors, memory or threads the next one is requested: an
Allocate may wait for it, and has CALL_DEADLINE_S."""

SCAN_BACKOFF_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Waits after scans that failed as a whole (sysfs not mounted yet); the last one repeats."""

# --- kubelet ----------------------------------------------------------------------------------------------

SOCKET_PATH_MAX_BYTES: Final = 107
"""sockaddr_un.sun_path is 108 bytes with its terminating NUL (linux/un.h)."""

RESOURCE_NAME_MAX_CHARS: Final = 63
"""The part after the slash: a Kubernetes label value."""

CALL_DEADLINE_S: Final = 12.0
"""A device plugin call in the daemon, from request to answer. Kubelet sets none for Allocate; PreStartContainer has
30 s. Longer than two INSPECTION_DEADLINE_S, and than two LEDGER_DEADLINE_S: an inspection or a read that hangs may be
outstanding already, and the call needs one after it."""

CALL_DEVICES_MAX: Final = 1024
"""Devices, and containers, in one device plugin call: kubelet names every available device of the resource in
GetPreferredAllocation, and the largest node has 16."""

CALL_IDS_MAX: Final = 8192
"""Device IDs in one device plugin call, all containers together. Kubelet asks for one container at a time, and names
every available device of the resource: 16 on the largest node. So many cost the registry some 20 ms."""

CALL_TEXT_MAX_CHARS: Final = 256 * 1024
"""Characters of all device IDs in one call: CALL_IDS_MAX of more than twice the length of a PCI address. The journal
keeps every call as it came."""

PREFERENCE_STEPS_MAX: Final = 20_000
"""Steps of the search for the fewest NUMA nodes and PCIe roots, over all containers of one GetPreferredAllocation:
about 10 ms, in which kubelet's other calls wait. A node with 16 GPUs takes tens of them, the worst one of 32 some
thousands; after that the fullest NUMA nodes and roots are taken."""

CALL_SETTLE_S: Final = 1.0
"""How long a resource's list keeps the devices of an answered call: kubelet 1.36 panics (nil pointer) if a device
vanishes from the list during an Allocate or GetPreferredAllocation that picks it, and it works on after our answer."""

LIST_FIRST_S: Final = 0.2
"""How long the answer to Allocate waits until the lists that kubelet must get before it have been sent; usually
microseconds. A client that does not read its stream delays one answer by this much, and none after it."""

LIST_HANDLED_S: Final = 0.1
"""100 ms. From a list that is sent to the answer of the Allocate that has changed it for devices of other pods:
kubelet's goroutine for lists may be later than the one for answers, and kubelet would give the next pod a GPU of that
group. Measured with a client of another gRPC (grpcio, a thread for each) on 2 cores with a load of 21 to 28: with the
answer right behind the list 1,843 of 8,000 lists were handled after it, by at most 19.4 ms (p99.9 11 ms); 50 ms later
3 of 800; 100 ms later none of 1,000, the latest 37 ms before it. A pod's start takes seconds, and a grant in a group
of its own waits for nothing."""

REGISTER_DEADLINE_S: Final = 60.0
"""Register. Kubelet dials us inside the call (10 s) and asks for options with no deadline of its own; a call that is
cancelled early makes it drop the running client as well, so this is far longer than any kubelet needs."""

STREAM_OPEN_DEADLINE_S: Final = 10.0
"""From Register's answer to kubelet's ListAndWatch; seen within milliseconds. Then we register again."""

REGISTER_BACKOFF_S: Final = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Waits before registering again, by the number of failures in a row; the last one repeats for ever. After a stream
that lasted there is none: 0 to 100 ms between a stream's end and Register lost 0 of 189 registrations. The next ones
are short because kubelet.sock exists for a moment before kubelet listens on it."""

STREAM_STABLE_S: Final = 5.0
"""A stream that ended sooner than this after it opened counts as a failed registration, so that a kubelet that drops
the stream at once leads to no tight loop."""

OLD_STREAM_GRACE_S: Final = 0.5
"""A new kubelet.sock while a stream of the old kubelet is still open: how long its end may take to be noticed (it comes
within milliseconds) before we end it ourselves and register."""

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

# --- the ledger and the groups' use -----------------------------------------------------------------------

POLL_S: Final = 2.0
"""How often the use of the groups is polled normally: how long another process can hold a free GPU before it is listed
Unhealthy. One poll reads two small files per GPU."""

POLL_FAST_S: Final = 0.25
"""The same while the release of a group is expected (for POLL_FAST_FOR_S), or a container waits to start: how soon a
release is seen."""

POLL_FAST_FOR_S: Final = 30.0
"""How long after the last change of holders (a holder comes or goes, a pod leaves kubelet's ledger, a device is
allocated) the poll runs every POLL_FAST_S; then every POLL_S. A pod has 30 s to end by default
(terminationGracePeriodSeconds), and a process that holds a GPU for longer may hold it for hours."""

CLOSING_S: Final = 10.0
"""How long a closed function has to be suspended again. The reset of a slot takes 2 to 3 s; one that is active for
longer is so for another reason (`power/control`), and can be opened."""

POLL_DEADLINE_S: Final = 10.0
"""One poll. `enable` and `power/runtime_status` never block; a scan of /proc of a large node takes a second or two."""

PROC_SCAN_REST: Final = 50
"""With `--holders proc`: after a pass over all processes none follows for so many times its own duration (2 % of one
core at most), or for PROC_SCAN_REST_MAX_S if that is shorter, unless something changed or a call waits. In between only
the known holders are read, so a release is seen at once."""

PROC_SCAN_REST_MAX_S: Final = 4.0
"""The longest rest between two such passes, two polls, so that there is a bound on any node: a process that opens a
group without its device, which sysfs does not show, is seen within POLL_S, this and two passes. Measured: 6 µs a
descriptor; up to 13,000 of them keep to the 2 %, and a node with 60,000 (0.37 s a pass) spends 8 % of one core."""

OPEN_WITHIN_S: Final = 0.5
"""With `--holders open`: how long after it was allowed a group may be opened as a probe. It may be allocated meanwhile,
and a container takes longer to start."""

LEDGER_S: Final = 5.0
"""How often kubelet's ledger is read, without List, while it lists any device of gpuactors: how late a forced deletion
is noticed, after which the old process runs on without any event."""

GETS_MAX: Final = 8
"""Pods that kubelet is asked for with one read of its ledger: it allows a burst of 10 questions, and 100 a second, to
all clients of PodResources together."""

LIST_S: Final = 3600.0
"""How often kubelet is asked to list its pods where no pod has come and nothing else leads to it. Not harmless, see
`core/host/asking.py`."""

LIST_UNSEEN_S: Final = 300.0
"""The same where no pod's cgroup is seen: how late it is noticed that another DRA driver has a GPU, if nothing opens
it."""

LIST_NAMES_S: Final = 10.0
"""The least time from one List to the next because a pod has come: how late its name is known, and that it has a GPU by
another driver's claim. On a kubelet without Get also how late a forced deletion is noticed."""

LIST_SOON_S: Final = 5.0
"""The same for the first pod after twice that time without List."""

LIST_AGAIN_S: Final = 1.0
"""The least time from one List to the next, if no claim waits for it."""

LIST_HELD_S: Final = 1.0
"""While a List is wanted, and an Allocate of ours is in flight: when it is looked again whether it may be asked for."""

GRANT_FILE_S: Final = 10.0
"""From the answer to an Allocate until kubelet is taken to be done with it, if its file does not show the device: the
file is written when the container has the devices of all resources, and another plugin may be slow. Seen: 4.5 s."""

ADMISSION_S: Final = 1.0
"""How long an Allocate waits for a device that has just been given to a pod: the same pod asks for it again where an
init container had it; then no cgroup of that pod appears, as kubelet makes that after the last container. Seen: 0.03 s
after the Allocate."""

ADMISSION_READ_S: Final = 0.1
"""How often kubelet's ledger is read meanwhile."""

LEDGER_QUIET_S: Final = 30.0
"""The same while it lists no device of gpuactors: how late it is noticed that a DRA driver, or another plugin under its
own name, has allocated one of its GPUs. No Allocate waits for that, as each has a read of its own."""

LEDGER_FRESH_S: Final = 0.1
"""A read of the ledger that was requested at most so long before a call counts for it as if it came after, unless the
call would be refused by it: a burst of calls costs 10 reads a second, of the 100 that kubelet allows all its
clients."""

LEDGER_SETTLING_S: Final = 1.0
"""The same while a kubelet that has just started does not list everything that its file names: a device that it has
listed once counts as ended as soon as it is missing, so each read leaves less to the file."""

TAKE_OVER_LEDGER_S: Final = 0.1
"""After a predecessor has ended its streams: when kubelet's ledger is read again. Not at once, as until kubelet has our
device lists each millisecond counts, and a read takes two."""

LEDGER_RETRY_S: Final = 5.0
"""After a failed read of kubelet's ledger; kubelet's appearing leads to a read at once."""

LEDGER_DEADLINE_S: Final = 5.0
"""One read of kubelet's ledger, PodResources and the file."""

LEDGER_LIST_DEADLINE_S: Final = 3.0
"""PodResources' part of it; List answers within milliseconds. The rest is for the file, which has the only copy of
Allocate's answers: a List that hangs must not keep a read from it."""

assert 2 * max(INSPECTION_DEADLINE_S, LEDGER_DEADLINE_S) < CALL_DEADLINE_S

KUBELET_LIST_TAKEN_S: Final = 1.0
"""A device list sent so long ago is kubelet's as well, unless kubelet has another one; it takes milliseconds. The two
are compared no more often than this, however often the ledger is read."""

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

DESERTED_MAX_S: Final = 20.0
"""The longest of these waits where kubelet has no healthy device of the resource at all: there is no other plugin to
contend with, and each further second is one without GPUs on this node."""

CONTENTION_OVER_S: Final = 600.0
"""The lists have agreed for so long: the other plugin no longer registers, and the next contention begins with the
first wait again. As long as the longest wait, so that a contention never seems over before its next round."""

assert CONTEND_BACKOFF_S[-1] <= CONTENTION_OVER_S

KUBELET_LIST_ID_MAX_CHARS: Final = 256
"""The part of an ID in kubelet's list that is compared and kept (another plugin's may have 4 MiB); ours have 12."""

FOREIGN_SOCKETS_MAX: Final = 16
"""Other plugins' sockets that are named to the operator; a node has a handful."""

LEDGER_SETTLE_S: Final = 30.0
"""After its start kubelet answers List before it knows its pods (kubernetes #112119 for the same list over HTTP), and
as long as the API server is away: until it has known them for so long, the entries of its ledger file count as well,
unless this kubelet has listed them before. More costs little: ended entries of the file count for longer."""

LEDGER_API_AWAY_S: Final = 600.0
"""How long a pod of kubelet's ledger file that has no cgroup counts while this kubelet does not show that it knows the
API server's pods: after a reboot it starts none of them before the API server answers, and has their devices for them.
Longer costs a GPU whose pod ended while kubelet was down on a node with no other pod."""

CHECKPOINT_DEADLINE_S: Final = 1.0
"""One read of kubelet's ledger file beside List: a disk that hangs delays a call by this much."""

assert CHECKPOINT_DEADLINE_S < LEDGER_DEADLINE_S

LEDGER_CALLED_S: Final = 2.0
"""The same after it has asked for a claim of a pod, where it is older than that: it takes over all pods of the API
server in one piece, oldest first, and asks while it does so."""

assert LEDGER_CALLED_S < LEDGER_SETTLE_S

CHECKPOINT_MAX_BYTES: Final = 16 * 1024 * 1024
"""Kubelet's ledger file: some 300 bytes a device. Something else by that name must not be read for ever."""

GRANT_GRACE_S: Final = 30.0
"""How long a device that Allocate granted counts as allocated while kubelet cannot confirm it: its ledger cannot be
read, or it restarts at that moment and does not know its pods yet."""

GRANT_LEDGER_S: Final = 0.5
"""When kubelet's ledger is read after an Allocate was answered. Seen: kubelet lists it as soon as it has the answer,
before PreStartContainer; so a device that is missing in a read requested later than this is not allocated."""

assert GRANT_LEDGER_S < GRANT_FILE_S < GRANT_GRACE_S

PRE_START_WAIT_S: Final = 25.0
"""How long PreStartContainer waits for the previous holder to close the device: under kubelet's 30 s. A wait ends at
once, after a refusal kubelet retries in 12 to 15 s."""

HISTORY_ENTRIES: Final = 20
"""How many changes of a device's health and reason are kept for `explain`: a few hours of an unsteady one."""

HISTORY_UNKNOWN_MAX: Final = 64
"""The history is kept for so many IDs in kubelet's ledger that mean no function of this node, or not any more."""

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
"""From dialling the control socket to the daemon's HTTP/2 SETTINGS, for a command; a daemon that runs sends them at
once."""

CONTROL_CALL_S: Final = 2.0
"""One reading of the running daemon's state by a command; it takes milliseconds."""

CONTROL_ANSWER_MAX_BYTES: Final = 4 * 1024 * 1024
"""Of the running daemon's state. The daemon sends no longer message (MESSAGE_MAX_BYTES in `grpc_trio/limits.py`)."""

COMPLETION_S: Final = 0.5
"""The running daemon's answer while somebody types a command; it takes milliseconds."""

WATCH_PAUSE_S: Final = 0.2
"""From one look at the state to the next for a command that watches: whatever happens meanwhile is in the next
message."""

WATCH_BEAT_S: Final = 5.0
"""Interval without a change after which a command that watches gets a sign of life: a daemon that hangs, or whose
process is stopped, keeps its connections."""

WATCH_GONE_S: Final = 1.0
"""A daemon that is away for less is not said to be gone: a hand-over takes milliseconds, a restart half a second."""

WATCH_RETRY_S: Final = 0.25
"""How often a command that watches dials a daemon that is gone: it costs next to nothing."""

CONTROL_CHECK_S: Final = 2.0
"""How often the daemon checks that the control socket is still its own, at both places (two lstat). It is not if the
directory was cleaned, or if this daemon was taken for hanging (stopped, frozen) and a successor serves. Well below
SUCCESSOR_GONE_S: the socket is there again before a predecessor takes this daemon for gone. Also how often a daemon
that finds one that it cannot ask looks again."""

CONTROL_RETRY_S: Final = 30.0
"""How often to try again where the control socket cannot be made (disk full, read-only)."""

SUCCESSOR_CHECK_S: Final = 1.0
"""After a hand-over: how often the predecessor checks that a process listens on the control socket. It has little else
to do, and an upgrade ends it soon."""

SUCCESSOR_GONE_S: Final = 5.0
"""No process has listened for so long: the successor has ended (kubelet restarts a container after 10 s, then 20 s),
and no GPU of this node is healthy until a daemon serves. Another hand-over costs some milliseconds."""

# --- supervision ------------------------------------------------------------------------------------------

RESTART_BACKOFF_INITIAL_S: Final = 0.1
RESTART_BACKOFF_MAX_S: Final = 10.0
RESTART_MAX_FAILURES: Final = 5
RESTART_WITHIN_S: Final = 60.0
"""An actor that the state hangs on (`daemon/app.py` says which) and that fails more often than this is broken: the
process exits with code 70 and is restarted by its supervisor. Any other one is restarted for ever."""

KUBELET_DIR_RETRY_S: Final = 1.0
"""How often to check for kubelet's device-plugins directory while it does not exist (inotify needs it to)."""

# --- the API server ---------------------------------------------------------------------------------------

API_REQUEST_S: Final = 10.0
"""One request to the API server, from the connection to the last byte. A prepare reads each of its claims and answers
within 35 s; a server that is well takes milliseconds."""

API_CONNECT_S: Final = 5.0
"""The connection's part of it, with TLS."""

API_BODY_MAX_BYTES: Final = 16 * 1024 * 1024
"""One answer of the API server. A slice with 128 devices has 60 KB; etcd stores no object above 1.5 MiB."""

API_LINE_MAX_BYTES: Final = 4 * 1024 * 1024
"""One event of a watch: one object, as above."""

CREDENTIAL_MAX_BYTES: Final = 1024 * 1024
"""A token, a certificate or a bundle of them; something else by that name must not be read for ever."""

KUBECONFIG_MAX_BYTES: Final = 1024 * 1024
"""A kubeconfig file; a few kilobytes for each cluster."""

API_KEPT_S: Final = 30.0
"""A connection to the API server is kept so long after an answer, for the next read: the claims of pods that start
together. The server closes one that is idle after 90 s (k8s.io/apiserver, pkg/server/secure_serving.go)."""

API_KEEPALIVE_IDLE_S: Final = 30
API_KEEPALIVE_INTERVAL_S: Final = 10
API_KEEPALIVE_PROBES: Final = 3
"""TCP's own probes of a silent connection: a watch whose server or path is gone without a word ends after a minute, and
the process is not woken for it."""

API_BACKOFF_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
"""Waits after requests that failed in a row; the last one repeats. An API server that restarts is away for some
seconds, and all nodes of a cluster come back to it at once: hence API_BACKOFF_JITTER."""

API_BACKOFF_JITTER: Final = 0.5
"""The share of such a wait that is random: 5,000 nodes come back over 15 s after an outage of minutes. A wait that the
server asks for (Retry-After) is longer by up to this share: it asks all that it refuses in one second for the same."""

API_READS_AT_ONCE: Final = 8
"""Reads of claims, or of domains, at one time: each may have a connection of its own, and 200 claims may wait."""

API_READ_FAILURES_MAX: Final = 5
"""The wait between two reads of an actor while the server refuses all of them grows up to that of API_BACKOFF_S after
so many failures, unless the server asks for more: a prepare waits 35 s in its call."""
assert 2 * API_BACKOFF_S[API_READ_FAILURES_MAX - 1] < 35

API_LOST_S: Final = 5.0
"""A watch that broke begins again within this time, at a random moment: a server that stops, or a balancer before it,
breaks those of all nodes at once, and they ask the next server. 1,000 of 5,000 nodes a second do so."""

API_CALM_S: Final = 60.0
"""After so long without a failure the next failure begins with the first of these waits again."""

API_HOUR_JITTER: Final = 0.25
"""The share by which what is asked once an hour is earlier or later, each time another one: all watches of a cluster
begin within seconds after an outage of the API server, and would all be renewed within the same seconds of each hour
after it."""

WATCH_S: Final = 3600.0
"""How long the server is asked to keep a watch, give or take API_HOUR_JITTER; then it is renewed from its last version:
one request an hour. The server's own choice would be 30 to 60 minutes (kube-apiserver --min-request-timeout)."""

WATCH_LATE_S: Final = 30.0
"""So much later we end it ourselves."""

WATCH_SILENT_S: Final = 300.0
"""A watch that says nothing for so long is ended, and all is listed anew: the server sends a bookmark every minute,
also when nothing has happened."""

WATCH_AGAIN_S: Final = (2.0, 2.0, 5.0, 30.0)
"""Before a watch is renewed, by how many before it ended in a row before WATCH_SHORT_S, give or take
WATCH_AGAIN_JITTER; the last one repeats. The first is also the wait of every renewal: a proxy that ends each watch at
once must not be asked without pause. A change meanwhile is seen that much later."""

WATCH_AGAIN_JITTER: Final = 0.75
"""The share of such a wait that is random: a server that stops ends all its watches at one moment, and all nodes ask
the next one for theirs. Of 5,000 nodes 1,700 a second do so."""

WATCH_SHORT_S: Final = 10.0
"""A watch that lasted less was cut short."""

SLICE_DEVICES_MAX: Final = 128
"""Devices in one ResourceSlice (resource.k8s.io/v1, ResourceSliceMaxDevices)."""

SLICE_TAINTED_DEVICES_MAX: Final = 64
"""The same where any device of it has a taint (ResourceSliceMaxDevicesWithTaintsOrConsumesCounters)."""

SLICE_ATTRIBUTES_MAX: Final = 32
"""Attributes and capacities of one device (ResourceSliceMaxAttributesAndCapacitiesPerDevice)."""

SLICE_STRING_MAX_BYTES: Final = 64
"""A string attribute of a device (DeviceAttributeMaxValueLength)."""

TAINT_VALUE_MAX_CHARS: Final = 63
"""The value of a taint has the rules of a label's."""

TAINTS_ASKED_S: Final = 3600.0
"""How often, give or take API_HOUR_JITTER, the API server is asked whether it keeps taints, besides at the start, after
each connection that was lost and after a write with taints: its gate may be switched while it restarts one replica
after the other."""

TAINTS_ASKED_LOST_S: Final = 60.0
"""After a connection that was lost it is asked within this time, at a random moment: every node has lost its own, and a
server that has just come back has enough to do."""

SLICE_SETTLE_S: Final = 0.1
"""A change of what is offered is written when nothing has changed for so long: a process is seen before kubelet's
ledger says whose it is. The scheduler learns of it this much later; where it was too quick, prepare refuses."""

SLICE_SETTLE_MAX_S: Final = 0.5
"""It is written after so long, whatever changes."""

assert SLICE_SETTLE_S < SLICE_SETTLE_MAX_S

WRITE_SEEN_S: Final = 30.0
"""Time in which the watch must show a write of gpuactors: afterwards all is listed anew."""

RESTORE_BACKOFF_S: Final = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Before slices that others have deleted or edited are restored, by how often that was done within RESTORE_CALM_S; the
last one repeats. Kubelet deletes them at its start, and perhaps once more in the background; somebody who answers each
restoration with an edit must not cost the API server a write per second for ever."""

RESTORE_CALM_S: Final = 600.0
"""Restorations before that do not count any more: kubelet repeats a deletion after at most five minutes."""

# --- Kubernetes Events ------------------------------------------------------------------------------------

EVENT_SETTLE_S: Final = 10.0
"""Minimum duration of a fact that is posted: not of a process that ends with its pod, or of a claim that waits for
the one before it."""

EVENT_AGAIN_S: Final = 300.0
"""Minimum interval before a fact is posted again that went and came back, or that the API server has refused."""

EVENT_FORBIDDEN_TRIES: Final = 5
"""A 403 counts as the server's last word after so many in a row: one that has just started knows no role yet."""

CLASSES_TRIES: Final = 7
"""How often the DeviceClasses are asked for in all, at a daemon's start: with API_BACKOFF_S a minute, so that an API
server that has just started has read its roles. An older role has no right to list them, and then nothing is lost."""

CLASSES_TOLD_MAX: Final = 16
"""DeviceClasses with a resource of gpuactors that are named; a cluster has some ten classes, and whoever makes a
thousand of that kind would fill the log."""

EVENT_REPEAT_S: Final = 1800.0
"""Interval at which a lasting fact is posted again: client-go's own for a series that goes on."""

EVENT_TTL_S: Final = 3600.0
"""The API server forgets an event so long after its last change (kube-apiserver --event-ttl)."""

assert EVENT_SETTLE_S < EVENT_AGAIN_S < EVENT_REPEAT_S < EVENT_TTL_S

EVENT_BURST: Final = 25
"""Requests for events in a row: 16 GPUs and their resources at once. client-go's own bound for one object."""

EVENT_REFILL_S: Final = 60.0
"""One more request after each of these seconds: of 5,000 nodes that all have something to tell all the time 83 a
second, of which the API server's default limits bear several hundred."""

EVENTS_MAX: Final = 512
"""Facts that are posted, or were in the last hour: more than twice the functions of the largest nodes."""

EVENT_LOOK_S: Final = 2.0
"""The state is looked at once in this time at most, whatever happens on the node."""

EVENT_MESSAGE_MAX_BYTES: Final = 1024
"""Of an event's message; the API server takes no longer note by events.k8s.io/v1 (pkg/apis/core/validation)."""

# --- node features ----------------------------------------------------------------------------------------

FEATURES_REST_S: Final = 5.0
"""The state is looked at once in this time at most; NFD itself looks once a minute, or when a file changes."""

FEATURES_EXPIRE_S: Final = 3600.0
"""The labels are ignored so long after their last renewal. A node without a daemon keeps them until then."""

FEATURES_RENEW_S: Final = 1800.0
"""The file is renewed so often if nothing changes."""

FEATURES_RETRY_S: Final = 60.0
"""After a write that failed."""

assert FEATURES_RENEW_S + FEATURES_RETRY_S < FEATURES_EXPIRE_S

# --- the doctor -------------------------------------------------------------------------------------------

DOCTOR_READ_S: Final = 10.0
"""One read of the host by `gpuactors doctor`; each takes milliseconds, and an operator waits before a terminal."""

DOCTOR_API_S: Final = 20.0
"""All that it asks the API server: two or three requests, each with API_REQUEST_S of its own."""

DOCTOR_AGAIN_S: Final = 2.0
"""Between two examinations of `gpuactors doctor --wait`: a daemon registers within a second."""

PROGRESS_SILENT_S: Final = 0.7
"""A read that takes longer is named on the terminal, and its time is updated as often. Less than CONTROL_CONNECT_S, so
that a daemon that hangs is named before it is given up."""

# --- quotations in our sentences --------------------------------------------------------------------------

QUOTED_ITEMS_MAX: Final = 16
"""Devices that are named in one sentence or field of the log: GPUs of the largest node. Of more only the number is
given."""

QUOTED_ID_CHARS_MAX: Final = 64
"""Characters of a device's ID, a driver's or a process's name in a sentence: three times a PCI address."""

QUOTED_NAME_CHARS_MAX: Final = 253
"""Characters of a pod's, namespace's, claim's or resource's name in a sentence: as many as Kubernetes allows."""

QUOTED_TEXT_CHARS_MAX: Final = 1000
"""Characters of another program's error text in a sentence; half of what gRPC carries of one
(GRPC_STATUS_TEXT_MAX_CHARS in `grpc_trio/limits.py`)."""

LOG_TEXT_MAX_CHARS: Final = 8192
"""One string in a line of the log, except tracebacks: a refusal of QUOTED_ITEMS_MAX devices with a reason each."""

LIBRARY_LINES_MAX: Final = 16
"""Lines of one text of a library in LIBRARY_LINES_S: enough to see what happens; a client that dials in a loop would
write thousands a second."""

LIBRARY_LINES_S: Final = 60.0
"""60 s. The others of one text in this time are counted."""

LIBRARY_TEXTS_MAX: Final = 256
"""Texts that are counted; a library that puts values into its texts itself has ever new ones."""

HOST_ABSENT_S: Final = 120.0
"""How long a start waits for a host that can be scanned, before the process ends with 69. /sys is mounted before any
service starts, and what a container mounts before its process does; the rest is for a slow machine."""

KUBELET_DIR_ABSENT_S: Final = 600.0
"""The same for kubelet's `device-plugins` directory, which kubelet makes when it first starts: a node that is being set
up may run this daemon some minutes before its kubelet. The supervisor restarts the daemon."""

# --- the journal ------------------------------------------------------------------------------------------

JOURNAL_FILE_MAX_BYTES: Final = 8 * 1024 * 1024
"""A file of the journal; then the next one begins. Each begins with the whole state, so it can be replayed by itself:
15 KB with 8 GPUs, 2 MB with 512 that were never quiet. A quiet node takes four days to fill one."""

JOURNAL_MAX_BYTES: Final = 64 * 1024 * 1024
"""All files of the journal together; the oldest are removed. A month of a quiet node with 8 GPUs: enough to have
last weekend's incident on Monday, and nothing to a disk that holds container images."""

JOURNAL_FILES_MAX: Final = 256
"""Each start of a daemon begins a file: a daemon that is restarted every few minutes must not fill a directory."""

JOURNAL_LINE_MAX_BYTES: Final = 16 * 1024 * 1024
"""A line of a journal that is replayed: the longest is a state, of 2 MB with 512 GPUs. A longer one counts as damage
and is passed over in pieces: decoded, a line takes some thirty times its length of memory."""

JOURNAL_WAITING_STEPS: Final = 1024
"""Steps that wait to be written. The worst burst (INBOX_EVENTS, each with an inspection after it) fits twice. Steps
beyond that while the disk hangs are counted, not kept: each step holds a state of its own."""

JOURNAL_DROPPED_LOG_S: Final = 60.0
"""The log has one line in this time about steps that found no room: in a flood of events there are three gaps a second,
and the journal has each."""

JOURNAL_BATCH_S: Final = 0.25
"""Steps are gathered for so long and written at once: one wake-up of a thread for a uevent and what follows from it.
A process that is killed (SIGKILL) loses so much; one that ends, even by a bug, nothing."""

JOURNAL_ROUTINE_S: Final = 60.0
"""Polls, ticks and reads of the ledger without any consequence wait so long, unless something else happens: their
common fields are written once. A process that is killed loses a minute in which nothing happened."""

JOURNAL_RETRY_S: Final = 30.0
"""After a failed write (disk full, read-only) the next one is tried, in a new file."""

JOURNAL_LAST_S: Final = 1.0
"""How long the end of the process waits for the last steps to be written; a disk that hangs must not delay it."""

RESYNC_INTERVAL_MAX_S: Final = 86_400.0
"""The longest interval that an operator may set between two full scans, a day: a change whose uevent was lost (the
kernel drops them when a socket's buffer is full) must be found at some time, and a scan of 4,096 functions costs 40
ms."""

# --- configuration ----------------------------------------------------------------------------------------

HTTP_CONNECTIONS_MAX: Final = 32
"""Connections to the HTTP endpoints at a time. Two probes and a scrape are three; for one more than this the oldest is
closed that has sent no whole request or does not take its answer."""

HTTP_CROWD_LOG_S: Final = 60.0
"""The log has one line about connections that were closed for others in this time; the metric has each."""

HTTP_REQUEST_S: Final = 5.0
"""A whole request and its answer: a client that sends its head byte by byte has its place no longer than this.
Kubelet's probes wait 1 s, Prometheus 10 s."""

HTTP_AGAIN_S: Final = 1.0
"""When an address that cannot be had is tried again: in an update on one machine the predecessor has it for a
moment."""

DIAL_OWN_S: Final = 0.8
"""How long one of our own sockets may take to answer the liveness probe; kubelet gives a probe 1 s by default."""

CONFIG_FILE_MAX_BYTES: Final = 1024 * 1024
"""A configuration file has a few hundred bytes; a device or a log named by mistake must not be read for ever."""

# --- the edges of the process ----------------------------------------------------------------------------

UEVENTS_RETRY_S: Final = 10.0
"""How often to try again where uevents are unavailable (no netlink socket allowed); the periodic scan works
meanwhile."""

STREAM_END_POST_S: Final = 1.0
"""How long a cancelled handler may still try to post that its stream or call is over."""

KUBELET_CONNECT_DEADLINE_S: Final = 5.0
"""Connecting to kubelet.sock: at once, or kubelet is not accepting."""

STOP_DEADLINE_S: Final = 8.0
"""From SIGTERM to the end of the process at the latest; Kubernetes kills after 30 s. Ending streams takes DRAIN_S."""

UEVENTS_AT_ONCE: Final = 256
"""Uevent messages taken from the socket before other tasks run: the inbox's size, far above one GPU's three or four."""

SERVED_FILE_MAX_BYTES: Final = 1 << 20
"""How much is read of the file of served resources: names of 63 characters, each with a few models of GPU."""

SERVED_READ_S: Final = 2.0
"""Reading that file, at the start and before we serve: kubelet waits for its plugin as long."""

SERVED_RETRY_S: Final = 10.0
"""After a failed write of the file of served resources."""

# --- claims (DRA) -----------------------------------------------------------------------------------------

CLAIM_ANSWER_S: Final = 35.0
"""35 s. A prepare or unprepare is answered within it: kubelet's deadline is 45 s, after which a user sees only
DeadlineExceeded, and a failed prepare is repeated only after 60 to 90 s (kubernetes issue 139836)."""

CLAIMS_FILE_MAX_BYTES: Final = 16 * 1024 * 1024
"""The checkpoint of the claims, and one CDI or metadata file: some kilobytes. Something else by that name must not be
read for ever."""

CORRUPT_FILES_KEPT: Final = 8
"""Corrupt checkpoints that are kept under names of their own, for whoever looks for the cause: a disk that corrupts
each one must not fill up with them."""

SYSFS_WRITE_DEADLINE_S: Final = 20.0
"""One write to sysfs. A GPU's unbind and its reset take seconds (NVIDIA's driver 2 to 5 s with 80 GB); a driver that
waits for its last user waits for ever. After it the child process waits alone, and holds the lock of the group."""

ACT_DEADLINE_S: Final = 30.0
"""One act on a GPU and its companions: kubelet's call is answered within 35 s, with the cause."""

assert SYSFS_WRITE_DEADLINE_S < ACT_DEADLINE_S < CLAIM_ANSWER_S

BIND_SETTLE_S: Final = 2.0
"""From a write that returned to what it asked for: the kernel has done it by then, and devtmpfs makes the node within
milliseconds. The rest is for a host directory that something else plays the kernel for."""

BIND_SETTLE_STEP_S: Final = 0.01
"""How often that is looked at: a few readlinks."""

PERSISTENCED_DEADLINE_S: Final = 5.0
"""A request to nvidia-persistenced: it opens or closes a GPU, 1 to 3 s without other users."""

IMEX_CHANNELS_MAX: Final = 2048
"""Channels of a node: NVIDIA's driver makes no more (NVreg_ImexChannelCount)."""

IMEX_READ_S: Final = 5.0
"""5 s. Reading what the host says of IMEX: three small files; then it is said that one of them hangs."""

IMEX_RETRY_S: Final = 60.0
"""60 s. A node without IMEX is asked again: its driver may be loaded later."""

IMEX_CTL_S: Final = 5.0
"""5 s. One answer of the host's nvidia-imex-ctl, which asks a daemon on this node: milliseconds, if that is well."""

NVML_S: Final = 5.0
"""5 s. One answer of NVML for all GPUs of the host's driver: below a second, as long as the driver is well."""

MODPROBE_S: Final = 20.0
"""20 s. One modprobe of a vfio driver: a tenth of a second, or seconds where the disk is busy. Below ACT_DEADLINE_S."""

MODPROBE_AGAIN_S: Final = 600.0
"""10 min. A driver that could not be loaded is tried again after this time, unless somebody has loaded it by then.
Until then its GPUs are not offered."""

MODPROBE_PATH_MAX_BYTES: Final = 256
"""Of /proc/sys/kernel/modprobe, which the kernel keeps in as many (KMOD_PATH_LEN)."""

CDI_SPECS_MAX: Final = 4096
"""Files of the CDI directory that are looked at for a device of somebody else's."""

CDI_READ_DEADLINE_S: Final = 1.0
"""One read of all of them beside kubelet's ledger: milliseconds. A disk that hangs delays a call by this much."""

CDI_SPEC_MAX_BYTES: Final = 1048576
"""1 MiB. Of each: that of NVIDIA's toolkit has some 20 KiB."""

IMEX_SAID_MAX_BYTES: Final = 65536
"""64 KiB, as much as a pipe holds. What is read of the output of such a program: a word, an error, a list of GPUs."""

IMEX_FILE_MAX_BYTES: Final = 65536
"""64 KiB. /proc/devices has 1 to 2 KB, the file of GPU Feature Discovery as much."""

FILES_DEADLINE_S: Final = 10.0
"""Writing or removing the files of a claim, or the checkpoint: milliseconds, and two syncs of a disk that is busy."""

FILES_AT_ONCE: Final = 32
"""Claims whose files are requested at one time. One thread writes them, one after the other: more would only be made
anew at each event, which took longer than the writes with 1,000 claims."""

FILES_QUEUE_MAX: Final = 256
"""Writes that wait for one thread: more than FILES_AT_ONCE, so that a full queue is a fault and not a crowd."""

TREE_ENTRIES_MAX: Final = 20_000
"""So many files and directories are removed in one act of what a container has left in a directory that it had mounted:
about a second. A daemon of a compute domain leaves four; the next try goes on (CLAIM_RETRY_S)."""

STATE_LOCK_WAIT_S: Final = 5.0
"""5 s. A write or read of the claims' state waits so long for that of another daemon, two syncs; then it says who
writes. Less than FILES_DEADLINE_S, so that this is said and not that the disk does not answer."""
assert STATE_LOCK_WAIT_S < FILES_DEADLINE_S

CDI_DIR_RETRY_S: Final = 5.0
"""How often to look for the CDI directory while it does not exist: it is made when the first claim is prepared, or by
the container runtime."""

CDI_TOUCH_REST_S: Final = 1.0
"""Minimum interval between two touches of CDI files that are posted: a program that removes them again and again must
cost no more than a check a second, and must not delay the answer to a prepare, which waits for one of milliseconds."""

PCI_IDS_MAX_BYTES: Final = 16 * 1024 * 1024
"""Of a pci.ids file, unpacked; today's has 1.5 MB."""

MODULES_ALIAS_MAX_BYTES: Final = 32 * 1024 * 1024
"""The kernel's modules.alias, modules.dep or modules.builtin: 1 to 2 MB on distributions' kernels."""

HOLDERS_NAMED_MAX: Final = 4
"""Processes named in one refusal to take a GPU; the others are counted."""

FITNESS_CHECK_S: Final = 60.0
"""60 s. Time between two checks whether a claim could bind a GPU on its host's driver."""

FITNESS_RETRY_S: Final = 15.0
"""15 s. The same while it could not: the reason is to go away soon after its cause. What is due within this time is
checked together, in one pass over all processes: five passes a minute at most, unless GPUs change."""

FITNESS_CHECKS_SIDE_BY_SIDE: Final = 32
"""GPUs of one check, each in a thread for some milliseconds: one whose sysfs hangs holds up no other."""

LOOK_SETTLE_STEP_S: Final = 0.5
"""As BIND_SETTLE_STEP_S in a look, for which nobody waits: 256 GPUs that their driver keeps started cost little."""

RETURN_RETRY_S: Final = 15.0
"""15 s. A return that is owed as the driver is not loaded is tried again: some readlinks, and no process."""

CLAIM_TOMBSTONE_S: Final = 90.0
"""90 s. How long an unprepared claim is remembered: kubelet repeats a prepare that was under way after 60 to 90 s."""

EARLIER_CLAIMS_MAX: Final = 1024
"""Claims of earlier boots of which the model of each device is remembered: four of a node with 256 GPUs."""

CLAIM_READ_RETRY_S: Final = 2.0
"""2 s. After a failed read of a claim from the API server while its prepare waits."""

CLAIM_RETRY_S: Final = 5.0
"""5 s. After a failed act that is tried again by itself: a release, or files that must be there."""

CLAIM_COLLECT_S: Final = 60.0
"""60 s. A prepared claim that kubelet lists for no pod is looked for at the API server after this time, and again after
it; after two answers that it does not exist it is released (kubernetes issues 139845, 139876)."""

CLAIM_FOUND_S: Final = 600.0
"""10 min. The same after an answer that it exists: kubelet lists no claim that no container uses."""


DOMAINS_TOUCH_REST_S: Final = 0.5
"""0.5 s. After a hint that a ComputeDomain has changed there is no other one for so long: while a claim waits, each
leads to a list of all of them."""

LABEL_RETRY_S: Final = 1.0
"""1 s. After a failed read or patch of the node's label, and after LABEL_CONFLICTS_MAX conflicts in a row."""

LABEL_READ_S: Final = 600.0
"""10 min. The node's label is read again by itself while a claim holds it. The watch of the Node shows a change at
once; more often, and 5,000 nodes would ask for nothing all the time."""

LABEL_LINGERS_S: Final = 5.0
"""5 s. The node's label stays for so long after the last claim of its domain: at a hand-over of the channel the next
claim comes 50 to 500 ms later (as measured), and NVIDIA's daemon ends where the label is away for 50 ms."""

DAEMON_SETTLES_S: Final = 10.0
"""10 s. After this time a daemon that was there before the label was added counts as one of this label: Kubernetes'
DaemonSet controller ends it within a second, if it has seen that the label was away."""

STATUS_SETTLES_S: Final = 5.0
"""5 s. What the status of a ComputeDomain says, where no clique says it, is of a daemon that was prepared so long
before, and is not made of a clique that has lacked it for so long: NVIDIA's controller writes the status every 2 s."""

LABEL_CONFLICTS_MAX: Final = 3
"""Patches in a row that meet another label than was read; after that there is a pause before each next one."""

LABELS_KEPT: Final = 64
"""Values of the label that are remembered as ours, the last ones: one for each domain that had a claim here."""

DOMAINS_FOUND_MAX: Final = 64
"""ComputeDomains whose namespace and name are remembered: as many as LABELS_KEPT."""

DOMAIN_READ_S: Final = 2.0
"""2 s. A compute domain is read again by itself while a claim waits for it: a watch may have been lost."""

CLAIM_CALL_S: Final = 40.0
"""40 s. An answer that the core owes for so long is answered by the gRPC service itself: below kubelet's 45 s, above
CLAIM_ANSWER_S with room for a registry that is busy."""

assert CLAIM_ANSWER_S < CLAIM_CALL_S

CALL_CLAIMS_MAX: Final = 256
"""Claims in one prepare or unprepare: those of one pod that name this driver. More than one for each of a node's GPUs
are no pod's."""

HEALTH_AGAIN_S: Final = 20.0
"""20 s. A list of health is sent again after it: kubelet's own default takes a device for Unknown after 30 s."""

HEALTH_TIMEOUT_S: Final = 60
"""60 s. After it kubelet takes a device for Unknown: a list may be lost and the next one late."""

assert 2 * HEALTH_AGAIN_S < HEALTH_TIMEOUT_S

HEALTH_MESSAGE_MAX_BYTES: Final = 1024
"""The reason of a device in a list of health. Kubelet's bound is 1024 characters; ours counts their bytes."""

DEREGISTERED_S: Final = 1.5
"""1.5 s. How long a plugin whose registration socket is gone still answers, unless kubelet disconnects: kubelet sees
the removal at once and acts on it each second (pluginmanager/reconciler), and a prepare that is refused in between is
tried again only after 60 s."""

RELAY_S: Final = 20.0
"""20 s. A daemon that has handed over its claims keeps its sockets for so long, and passes on what kubelet still asks
of it. Kubelet's plugin watcher registers the successor after 0.1 to 1 s (seen), and after 17.6 s if the first GetInfo
was late; without the one and the other a pod starts 60 to 90 s late."""

RELAY_TRY_S: Final = 0.05
"""50 ms. How often the successor's socket is tried while it is not there: it comes within milliseconds."""

RELAY_OWN_S: Final = 1.0
"""1 s. As long as no successor answers, our own core is asked again so often: it may serve again."""

RELAY_CONNECT_S: Final = 1.0
"""1 s. From dialling the successor to its HTTP/2 SETTINGS, which a daemon that runs sends at once."""

STOP_HANDED_OVER_S: Final = 50.0
"""50 s. From SIGTERM to the end of a process that has handed over its claims, at the latest: the prepares in its hands
have up to CLAIM_CALL_S, and it passes calls on for RELAY_S. Kubernetes kills it after 60 s
(`terminationGracePeriodSeconds` where claims are served)."""

assert RELAY_S + DEREGISTERED_S < CLAIM_CALL_S + DEREGISTERED_S < STOP_HANDED_OVER_S

PLUGIN_SOCKETS_CHECK_S: Final = 5.0
"""5 s. How often the two sockets of the DRA plugin are looked for, besides what inotify reports: it says nothing about
a directory that another one is mounted over. Kubelet notices a gap of 30 s."""
