"""Histories that were found once and must never fail again, and faults that are known and not repaired yet.

A new one comes from a failing campaign: the line that it prints has the script. Its name says what it is about.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tests.histories.administrator import ADMINISTERED
from tests.histories.claims import CLAIMS
from tests.histories.domains import DOMAINS
from tests.histories.play import Failure
from tests.histories.script import Script, parse_script

FOUND: Final[dict[str, Script]] = {
    name: parse_script(script)
    for name, script in {
        # The names that it has served were not on disk yet: they were written again 10 s after a failure.
        "a daemon without descriptors serves again, and one with another state directory takes over": (
            "unplug slowly; unplug slowly@1; half gone@2; a daemon starts with another state directory+0.3; "
            "the successor is told to stop; descriptors run out; the next daemon selects other cards; a pod comes; "
            "a daemon starts with another state directory; plug a card without driver@357; "
            "another client sends a wrong message@551+3; bind to vfio-pci@87+3"
        ),
        "a daemon takes over with a damaged ledger file, and a pod has a GPU by an ID of an older plugin": (
            "a daemon crashes; scans fail+0.001; an older plugin has given a card away; a pod comes; "
            "the ledger file is damaged"
        ),
        "a daemon with another state directory": (
            "a pod comes+0.3; a daemon starts with another state directory+3; a pod comes+3"
        ),
        "a daemon is told to stop while an Allocate waits for a reader that crashes": (
            "inspections and scans take long; a pod comes+0.001; the daemon is told to stop+0.001; scans fail+0.05; "
            "polls take long; the inspector crashes+0.05; unbind; polls can read nothing"
        ),
        "a state directory deleted under a daemon": (
            "the state directory is deleted+3; a successor starts+3; a pod comes+3"
        ),
        "a state directory deleted under a daemon, then its successor ends": (
            "the state directory is deleted+3; a successor starts+3; a pod comes+3; the successor is told to stop"
        ),
        "a daemon with another state directory and other selectors, while a pod has a GPU of another model": (
            "a pod for another model comes@100+11; plug another model@305+3; the next daemon selects other cards@182; "
            "a daemon starts with another state directory@518+0.05"
        ),
        "a node reboots while a pod has an ID that is no device's, and the API server is away": (
            "our resource has an odd ID@169+0.3; the node reboots with another model in a slot@48+0.05; "
            "the API server goes away@91+11"
        ),
        "the machine sleeps while an Allocate waits for the cgroup of the pod that had the device just before": (
            "a card comes back in another group@5; both cards of a group are released@1+0.001; the clock jumps"
        ),
        "the machine sleeps just after another driver's claim has come": (
            "another client abandons an Allocate+11; a claim takes a card+11; the clock jumps+0.001; "
            "pods come in a burst"
        ),
        "a reboot with few descriptors, after which scans fail and the inspector crashes": (
            "descriptors run out; the node reboots with another model in a slot; another plugin has odd IDs; "
            "scans fail; a pod is force-deleted+11; the inspector crashes"
        ),
        "a card's unbind waits, and polls of its group can read nothing": (
            "a daemon crashes@150+3; a daemon starts@110; both cards of a group are released@512+0.3; "
            "a successor starts@77; unplug the second card@200; another client allocates nonsense@164; "
            "the reader of the ledger crashes@146; the successor is told to stop@424; descriptors run out@589+3"
        ),
        "the machine sleeps after a reboot with the API server away, before kubelet was asked": (
            "pods come in a burst@427+0.3; the API server goes away@327; "
            "the node reboots with another model in a slot@156+0.001; the clock jumps@443+0.05"
        ),
        "a pod comes for the card of one that ends, while the ledger cannot be asked": (
            "pods come in a burst@554+0.3; the ledger is answered with nonsense@476+0.001; a pod ends@529; "
            "pods come in a burst@566"
        ),
        "the API server is away for ten minutes after a reboot": (
            "both cards of a group are released@493; the uevent watcher crashes@180+11; "
            "the next daemon selects other cards@86; the API server goes away@39; "
            "the node reboots with another model in a slot@476; a pod is force-deleted and dies late@576; "
            "pods come in a burst@240+11; the clock jumps@116+3"
        ),
        "a pod comes in the gap of a hand-over to another state directory": (
            "firmware reserves memory of the group; pods come in a burst; "
            "a daemon starts with another state directory"
        ),
        "kubelet asks for a preference after a hand-over, before its ledger names what the predecessor has granted": (
            "inspections fail; plug a second card into the group+0.3; a daemon starts with another state directory; "
            "pods come in a burst"
        ),
        "a group is released under a daemon that hands over, whose inspections take long": (
            "a successor starts; inspections and scans take long; both cards of a group are released"
        ),
        "late binding": "plug a card without driver@3; bind to vfio-pci@3",
        "new model while kubelet restarts": ("kubelet stops; plug a never-seen model@3+0.3; kubelet starts"),
        "a new card while inspections fail": "inspections fail; plug a never-seen model@3",
        "a card swapped for another model under a call": (
            "inspections and scans take long; a pod comes+0.001; unplug; plug another model"
        ),
        "an unbind whose uevents are lost": "the next uevents are lost; unbind",
        "forced deletion, then the next pod": (
            "a pod for two cards comes+0.3; a pod comes+0.3; a pod is force-deleted and dies late; "
            "a pod for two cards comes+0.3"
        ),
        "an external process opens a card while the daemon is away": (
            "the daemon is told to stop+0.3; an external process opens a card@1+0.3; a pod comes; a daemon starts+3; "
            "an external process closes a card@1"
        ),
        "a daemon starts while the class of an allocated card cannot be read": (
            "a pod for two cards comes+0.3; an attribute turns unreadable@12; a successor starts+3"
        ),
        "a daemon starts between a pod's end and its leaving the ledger": (
            "a pod comes; a pod ends+0.001; a successor starts"
        ),
        "a card that was handed out vanishes before the ledger could be read": (
            "the ledger is answered with nonsense; a pod for two cards comes; Register takes long+0.001; "
            "unplug slowly; a pod ends slowly; a plugin crashes+0.001"
        ),
        "another client dials while kubelet goes": (
            "plug a never-seen model@4; a successor starts; kubelet stops; another client abandons an Allocate@2"
        ),
        "an external process opens a card while a poll can read nothing": (
            "an external process opens a card; polls can read nothing; a pod for two cards comes"
        ),
        "a group is held through the one card that is being unbound": (
            "an external process opens a card@1; plug a second card into the group@1; unbind@1"
        ),
        "a card that an external process has open is unbound, and asked for": (
            "an external process opens a card+3; unbind; a pod for two cards comes+3; an external process is killed"
        ),
        "a card is pulled at once after an external process has opened it": (
            "an external process opens a card@1+0.001; unplug@1+0.3; a successor starts+3"
        ),
        "a card is unbound under the machine of a pod that is gone": (
            "a pod comes+3; a pod is force-deleted and dies late+1; unbind slowly+1"
        ),
        "a successor polls what its predecessor has just handed out": (
            "inspections and scans take long; a successor starts; a pod for two cards comes; Register takes long"
        ),
        "a card that cannot be identified is given to the next pod": (
            "a pod for two cards comes; plug a card without driver@3+0.05; the daemon is told to stop; "
            "a virtual machine ends by itself; an attribute turns unreadable+0.001; a daemon starts; "
            "Register takes long; a pod comes+0.001"
        ),
        "a card is pulled before a new daemon could read kubelet's ledger": (
            "a pod comes+0.001; the daemon is told to stop; the ledger is answered with nonsense; "
            "reads of the ledger fail; a daemon starts+0.001; unplug"
        ),
        "the machine sleeps between Allocate and the read of the ledger": (
            "a pod for two cards comes+0.001; a pod ends slowly; the clock jumps"
        ),
        "a card is opened while it is being bound, and its pod is force-deleted": (
            "unbind slowly+0.3; pods come in a burst; bind slowly+0.3; a pod is force-deleted@1"
        ),
        # --- issue 10: odd neighbours, and views that are old ---
        "a claim takes a card while nothing of ours is given away": "a claim takes a card",
        "another plugin gives a card away that a pod of ours has": (
            "a pod comes+3; another plugin gives a card away+3; another plugin gives a card away@1; "
            "another plugin gives a card away@2"
        ),
        "another plugin's IDs are no numbers": (
            "a pod comes+3; another plugin has odd IDs+3; another plugin has odd IDs@18; "
            "another plugin has odd IDs@36; another plugin has odd IDs@54+3"
        ),
        "IDs of our resource mean nothing": (
            "our resource has an odd ID+3; our resource has an odd ID; our resource has an odd ID+3"
        ),
        "the next daemon has other names, and cannot read the ledger's file": (
            "both cards of a group are released; the daemon is told to stop; the ledger file is damaged+0.001; "
            "the reader of the ledger crashes; the next daemon has another pci.ids"
        ),
        "a pod whose ID of our resource means nothing is deleted by force": (
            "our resource has an odd ID+11; a pod is force-deleted"
        ),
        "an older plugin's GPU comes back in another group": (
            "the daemon is told to stop+3; an older plugin has given a card away; a daemon starts+11; unplug+3; "
            "a card comes back in another group+3"
        ),
        "an older plugin's card is asked for before kubelet's ledger could be read": (
            "a daemon crashes; an older plugin has given a card away; pods come in a burst; reads of the ledger fail"
        ),
        "a GPU that is unplugged under an older plugin's pod is listed by the older ID once the ledger is read": (
            "a daemon crashes; an older plugin has given a card away@103; the ledger is answered with nonsense; "
            "unplug@1"
        ),
        "an older plugin's ID stands for the first of two GPUs that share a group": (
            "a daemon crashes; an older plugin has given a card away@1; both cards of a group are released@1"
        ),
        "both cards of a group are released, and one is given to the next pod at once": (
            "both cards of a group are released+3"
        ),
        "both cards of a group are released, and one is pulled before its next pod was answered": (
            "both cards of a group are released; unplug"
        ),
        "both cards of a group are released, and one goes attribute by attribute": (
            "both cards of a group are released@2; half gone@428"
        ),
        "both cards of a group are released, and the one that is given to the next pod is unbound": (
            "both cards of a group are released@2; unbind slowly+0.001; unbind@2"
        ),
        "a pod ends when kubelet has already chosen which cards the next pod may get": (
            "both cards of a group are released@1; a virtual machine ends by itself; a pod is force-deleted; "
            "another plugin gives a card away@187"
        ),
        "pods come in a burst on groups of two": (
            "plug a second card into the group; plug a second card into the group@1; "
            "plug a second card into the group@2+3; pods come in a burst+3"
        ),
        "another takes a card just before it is asked for": (
            "a pod comes+3; another plugin gives a card away@1+0.3; a pod for two cards comes+0.3"
        ),
        "a claim takes a card just before it is asked for": (
            "a pod comes+3; a claim takes a card@1+0.3; a pod for two cards comes+0.3"
        ),
        "a second plugin on our resource comes, and goes": (
            "a second plugin takes our resource@6+3; the second plugin goes+3"
        ),
        "a second plugin on our resource comes, and stays": (
            "a second plugin takes our resource@6+3; plug a card that vfio-pci knows@3; "
            "the second plugin sends its list+3"
        ),
        "a second plugin goes while our list changes only in what is Unhealthy": (
            "a second plugin takes our resource+0.001; our resource has an odd ID"
        ),
        "a second plugin comes and goes within a second in which our list changes": (
            "plug a card without driver@4; plug a second card into the group@4; "
            "a second plugin takes our resource+0.001; unplug the second card@4"
        ),
        "a second plugin goes just after our list has changed": (
            "a second plugin takes our resource; another client watches+11; unbind slowly"
        ),
        "a second plugin comes and goes while nothing of ours is healthy": (
            "pods come in a burst; half gone+0.001; unbind slowly@2; plug another model@4; "
            "the next uevents are late+11; a pod is force-deleted; a second plugin takes our resource; "
            "a pod for another model comes+0.001"
        ),
        "a second plugin comes and goes while external processes have every card": (
            "an external process opens a card+1; an external process opens a card@1+1; "
            "an external process opens a card@2+11; a second plugin takes our resource@6+0.3; "
            "the second plugin goes+3"
        ),
        "a second plugin comes, is seen, and goes while external processes have every card": (
            "an external process opens a card+1; an external process opens a card@1+1; "
            "an external process opens a card@2+11; a second plugin takes our resource@6+3; "
            "the second plugin goes+3; an external process closes a card+3"
        ),
        "a monitor dials first, and kubelet's stream is lost while external processes have every card": (
            "a monitor watches, and dials again first+0.3; kubelet stops+0.3; Register takes long; kubelet starts+3; "
            "an external process opens a card+1; an external process opens a card@1+1; "
            "an external process opens a card@2+11; a stream is lost@6+3"
        ),
        "a monitor dials first, and kubelet's stream is lost until an external process closes its card": (
            "a monitor watches, and dials again first+0.3; kubelet stops+0.3; Register takes long; kubelet starts+3; "
            "an external process opens a card+1; an external process opens a card@1+1; "
            "an external process opens a card@2+11; a stream is lost@6+3; an external process closes a card; "
            "a pod comes+3"
        ),
        "a monitor dials first after kubelet's restart, and kubelet's stream is lost": (
            "a monitor watches, and dials again first+0.3; kubelet stops+0.3; Register takes long; kubelet starts+3; "
            "a stream is lost@6"
        ),
        "the selection is narrowed under a pod": (
            "a pod for two cards comes+3; the next daemon selects other cards; a successor starts+3"
        ),
        "a card that is selected no more is pulled under its machine": (
            "a pod for two cards comes+0.3; unplug@1; the next daemon selects other cards; the daemon is told to stop"
        ),
        "pci.ids is renewed under a pod": (
            "a pod for two cards comes+3; the next daemon has another pci.ids; a successor starts+3"
        ),
        "pci.ids is renewed under every pod, and the new name is not served": (
            "pods come in a burst+3; the next daemon has another pci.ids; the node reboots+11; a pod ends+3; "
            "our resource has an odd ID+3; a pod comes+3"
        ),
        "pci.ids is renewed, and the daemon that serves gives cards away while its successor cannot scan": (
            "the next daemon has another pci.ids; a successor starts; scans fail; both cards of a group are released"
        ),
        "pci.ids is renewed under a pod that is gone, whose GPU is pulled out while its machine still has it": (
            "the next daemon has another pci.ids; a pod comes+0.3; a pod is force-deleted; a successor starts+0.001; "
            "unplug slowly"
        ),
        "pci.ids is renewed while another plugin serves the resource of the old name": (
            "the daemon is told to stop; a second plugin takes our resource+0.001; the next daemon has another pci.ids"
        ),
        "an older plugin's pod has ended, and only kubelet's file can be read, which still has it": (
            "the ledger is answered with nonsense; the daemon is told to stop; both cards of a group are released; "
            "an older plugin has given a card away@1; a virtual machine ends by itself+0.3"
        ),
        "a second plugin has as healthy what we have, and not the odd ID that a pod has": (
            "our resource has an odd ID+3; a second plugin takes our resource+3"
        ),
        "a daemon starts while there are no descriptors, and later another plugin passes by": (
            "descriptors run out+0.001; the node reboots+30; inspections and scans take long; unplug+0.3; "
            "a second plugin takes our resource+0.05; the second plugin goes+0.05"
        ),
        "descriptors run out, and after that inspections fail": (
            "descriptors run out; inspections fail; a pod comes; an inspection hangs+11"
        ),
        "after a reboot a card is asked for that a claim has, as soon as kubelet has heard of its pods": (
            "a pod for two cards comes; a claim takes a card; a pod for another model comes; the node reboots"
        ),
        "a successor that selects other cards fails to inspect one that a pod has, and that is being unbound": (
            "the next daemon selects other cards; both cards of a group are released; inspections fail; unbind@1; "
            "a successor starts"
        ),
        "a card that no selector chooses is being unplugged, and is seen before kubelet's ledger that names it": (
            "an inspection hangs; pods come in a burst+0.001; both cards of a group are released@2; "
            "the clock jumps+0.05; the next daemon selects other cards; unplug the second card@2; a daemon crashes"
        ),
        "pci.ids is renewed, and the successor does not serve what another plugin has": (
            "a daemon crashes; a second plugin takes our resource@155; a daemon starts; "
            "the next daemon has another pci.ids; a successor starts"
        ),
        "a container was to get the node of the other card of its group, which is unplugged": (
            "both cards of a group are released@1; both cards of a group are released@1; unplug the second card@1"
        ),
        "a daemon that selects fewer cards cannot read kubelet's ledger at first": (
            "pods come in a burst; the next daemon selects other cards+0.3; the daemon is told to stop; "
            "the ledger is answered with nonsense+0.001"
        ),
        "pci.ids is renewed, and kubelet's ledger cannot be read while its pods have opened nothing yet": (
            "reads of the ledger fail; pods come in a burst; a daemon crashes@115; "
            "the ledger is answered with nonsense; the next daemon has another pci.ids; a pod comes"
        ),
        "a card that an older plugin gave away, and no selector chooses, is being unbound": (
            "the daemon is told to stop+0.001; the next daemon selects other cards; "
            "an older plugin has given a card away@163; unbind slowly@1"
        ),
        "a successor that names cards otherwise gives one away and goes": (
            "the next daemon has another pci.ids; a successor starts; both cards of a group are released+0.001; "
            "the successor is told to stop"
        ),
        "pci.ids is renewed, and pods have nothing by the old name but what cannot be known": (
            "the daemon is told to stop; our resource has an odd ID+0.001; an older plugin has given a card away; "
            "the next daemon has another pci.ids"
        ),
        "a second plugin with our healthy devices goes while our list changes": (
            "a second plugin takes our resource@150; an inspection hangs+3; unplug slowly; a stream is lost@261"
        ),
        "ids that could not be read can be read in the middle of an unbind": (
            "pods come in a burst+0.3; an attribute turns unreadable@2; a successor starts; unplug@2+0.001"
        ),
        "an older ID of a group with two cards, of which kubelet's file still gives one to a pod that has ended": (
            "both cards of a group are released; a daemon crashes; a pod ends+0.3; "
            "an older plugin has given a card away@2; both cards of a group are released@2"
        ),
        "another client was refused what a pod cannot ask for, as another plugin took the resource and left": (
            "a second plugin takes our resource; another client allocates nonsense@462+0.001; the second plugin goes; "
            "both cards of a group are released"
        ),
        "kubelet's file still gives a card to a pod that has ended, and another pod has it by an older ID": (
            "pods come in a burst; a pod for two cards comes+0.001; a daemon crashes@72; a pod ends+0.3; "
            "an older plugin has given a card away"
        ),
        "a second plugin gives the older ID of an ended pod away, which means another card since the reboot": (
            "a daemon crashes; an older plugin has given a card away@2; the node reboots+0.001; "
            "a second plugin takes our resource+0.001; pods come in a burst+0.3; a daemon crashes"
        ),
        "an older ID is given away again after a reboot, and its pod keeps it over another one": (
            "a daemon crashes; an older plugin has given a card away@2; the node reboots+0.001; "
            "pods come in a burst+3; a pod ends+3; the node reboots+3; a pod comes"
        ),
        "after a reboot an ended pod's older ID means a card that another pod has by its address": (
            "a daemon crashes; an older plugin has given a card away@2; a daemon starts+3; pods come in a burst+3; "
            "the node reboots+11; pods come in a burst+3"
        ),
        "kubelet's file is damaged just when it starts again": (
            "pods come in a burst+0.05; kubelet stops; a pod is force-deleted+0.3; kubelet starts; "
            "the ledger file is damaged"
        ),
        "kubelet restarts while the API server is away": (
            "a pod for two cards comes+3; the API server goes away; kubelet stops; kubelet starts+11"
        ),
        "a card is swapped for another model while no daemon runs": (
            "a card comes back in another group@4; both cards of a group are released@1; a daemon crashes@117; "
            "half gone@4+0.3; plug a never-seen model@4"
        ),
        "groups have other numbers after a reboot": "pods come in a burst+3; the node reboots",
        "groups have other numbers after a reboot, and List is answered with nonsense": (
            "pods come in a burst+0.001; the ledger is answered with nonsense; the node reboots@561; "
            "the next List is cut"
        ),
        "groups have other numbers after a reboot, and one was free": (
            "a pod comes+3; the node reboots; a pod comes; a pod comes+11"
        ),
        "no descriptor is left while kubelet restarts": (
            "a pod comes+0.3; descriptors run out; kubelet stops; kubelet starts+11; a pod comes+11"
        ),
        "a successor cannot read the host for most of a minute": (
            "a successor starts; descriptors run out+11; scans fail"
        ),
        "enable goes back to 0 before the next binding": (
            "unbind+3; enable is switched by hand; bind to vfio-pci+3; unbind; enable is switched by hand; "
            "bind to vfio-pci+3; an external process opens a card+3"
        ),
        "enable was switched on beside a free card": (
            "plug a second card into the group; unbind+3; enable is switched by hand+3"
        ),
        "a card is replaced by one whose enable was never touched": (
            "unbind+3; enable is switched by hand; bind to vfio-pci+3; unplug+3; plug a card that vfio-pci knows; "
            "an external process opens a card+3"
        ),
        "a driver whose name is no UTF-8 makes a group not viable under a call": (
            "plug a companion+3; inspections and scans take long; pods come in a burst; "
            "bind the companion to a host driver@6+3"
        ),
        "another driver's claim has a card by its file alone, and pods come": (
            "another driver prepares a card for a claim@12+3; a pod comes; a pod comes; a pod comes+3; "
            "another driver unprepares its claim+3"
        ),
        "another driver's claim has a card by kubelet's list and its file": (
            "another driver prepares a card for a claim@7+0.3; a pod for two cards comes+3; a pod comes+3; "
            "a successor starts+3; another driver unprepares its claim"
        ),
        "another driver's claim ends while its pod ends, and a pod comes": (
            "another driver prepares a card for a claim; a pod for two cards comes; another driver unprepares its claim"
        ),
        "nothing says which card another driver's claim has": (
            "a pod comes+3; another driver prepares a card for a claim@1+0.3; a pod comes+3; a successor starts+3"
        ),
        "a card that is counted under another name goes, and nobody serves its old name": (
            "both cards of a group are released@2; the next daemon has another pci.ids; a successor starts+0.3; "
            "the successor is told to stop; unplug the second card@2; a pod comes+11; a daemon crashes"
        ),
    }.items()
}
"""By what they are about."""


FOUND_WITH_CLAIMS: Final[dict[str, tuple[int, Script]]] = {
    name: (seed | CLAIMS, parse_script(script))
    for name, (seed, script) in {
        "the configuration file excludes the card of a claim, and the next daemon starts with it": (
            1,
            "a pod with a claim comes@1+3; the configuration file chooses other cards+15; kubelet stops+1; "
            "kubelet starts+20; a daemon crashes+1; a daemon starts+20; a pod ends+20",
        ),
        "a daemon is told to stop while an Allocate waits for a poll and an inspection": (
            210724916396,
            "polls take long; a pod and a claim race for a card+0.001; SR-IOV is switched on for vGPUs@4; "
            "the daemon is told to stop; inspections and scans take long+3",
        ),
        "a daemon is killed while it makes the sockets of its DRA plugin": (
            5173842126,
            "the node reboots@454; a daemon crashes@117+0.05",
        ),
        "kubelet deletes the slices once more after its start": (
            8025088847,
            "the API server goes away; kubelet stops+0.3; kubelet starts+11",
        ),
        "neither kubelet nor the daemon knows a claim any more whose metadata is there after a reboot": (
            7728052990,
            "a pod with a claim comes+0.001; kubelet stops; kubelet loses its claims; the daemon is told to stop; "
            "kubelet starts+0.001; the checkpoint is lost; a pod is force-deleted; the node reboots",
        ),
        "after a lost checkpoint and a reboot only the metadata of a claim is left": (
            6340400397,
            "a pod with a claim comes@282+11; a daemon crashes@237+0.001; the checkpoint is lost@96+3; "
            "a pod with a claim ends@575+70; the node reboots@198+11; a pod with a claim comes@282+0.001",
        ),
        "a pod comes to a daemon that has lost its checkpoint, and a claim's files are gone as its cards moved": (
            6862808338,
            "a pod with a claim for two cards comes; a process uses a card by its host driver@3+0.001; a pod comes; "
            "two cards are rescanned and swap their group numbers; a daemon crashes@54; the checkpoint is lost",
        ),
        "a write that hung fails when it goes on": (
            8224039495,
            "a write to sysfs hangs; a pod with a claim comes@4; a write to sysfs does nothing@311; "
            "a stream is lost+0.001",
        ),
        "a pod is deleted by force while it starts, and a claim waits for its GPU": (
            4526351612,
            "a pod with a claim for two cards comes; a successor starts; "
            "the API server answers with a conflict+0.3; the clock jumps; the successor is told to stop; "
            "an external process opens a card@170+0.001; pods come in a burst@62+0.001; "
            "an answer of the API server is lost@481+3; an external process is killed@536; "
            "the API server is overloaded@267+3; reads of the ledger fail@54; "
            "a pod with a claim is force-deleted, has a successor and dies late@524+0.05; "
            "a pod and a claim race for a card@128+0.3; a pod ends@53+0.3; "
            "a pod is force-deleted and dies late@77; a pod with a claim comes@124",
        ),
        "two cards swap their numbers while PreStartContainer waits for a slow inspection": (
            0,
            "inspections and scans take long; a pod comes+0.7; "
            "two cards are rescanned and swap their group numbers",
        ),
        "a card is bound for a claim while a mediated device is being made of it": (
            212059487983,
            "the next uevents are lost; a mediated device is made slowly@3; a pod with a claim comes@3",
        ),
        "the same while the socket of uevents is closed": (
            0,
            "inspections and scans take long; a pod comes+0.7; the uevent watcher crashes; "
            "two cards are rescanned and swap their group numbers",
        ),
        "kubelet asks again for a claim whose group has got a disk of the host": (
            211757596317,
            "a process uses a card by its host driver@346; a pod with a claim comes@112+3; the clock jumps@285+0.05; "
            "that process ends@244+70; a disk of the host comes into the group@496; a mediated device is made@369+3",
        ),
        "a claim whose checkpoint is lost is deleted while its card gets another group, and no daemon runs": (
            5593498958,
            "a pod with a claim comes+0.001; the daemon is told to stop; reads of the ledger take long+3; "
            "the checkpoint is lost; a card is pulled; a claim is deleted at the API server",
        ),
        # A poll that had begun before opened the group that was the pod's by then.
        "two cards swap their groups while a poll that may open them is under way": (
            8157869810,
            "a pod and a claim race for a card; the API server goes away; "
            "the node reboots with another model in a slot@1; the API server is back+70; "
            "two cards are rescanned and swap their group numbers",
        ),
        # The claim was bound again, and the card was never returned to its driver.
        "a card's inspection fails after the act that has bound it": (
            210623190923,
            "reads of the ledger take long; the next uevents are late; a stream is lost@1; "
            "a pod with a claim comes@4+0.001; inspections fail+70",
        ),
        "the write of a claim's file fails after a crash, and the claim ends": (
            5961405972,
            "a pod with a claim comes; a daemon crashes@173; the checkpoint is corrupt; a card is pulled; "
            "a card that was pulled comes back with another group number; a virtual machine ends by itself; "
            "a daemon starts; the CDI files can not be removed+0.001",
        ),
    }.items()
}
"""On nodes with claims, each with the seed of the schedule that shows it; one may have vGPUs as well."""

FOUND_WITH_DOMAINS: Final[dict[str, tuple[int, Script]]] = {
    name: (DOMAINS | seed, parse_script(script))
    for name, (seed, script) in {
        "a container runs whose claim nobody knows any more, and somebody has set the label": (
            12391287617,
            "a pod with a channel comes; the slices are deleted+3; a daemon crashes; the checkpoint is lost; "
            "a pod with a claim is force-deleted, has a successor and dies late; a daemon starts; "
            "somebody sets the label to what no claim has+11; reads of the ledger fail+11",
        ),
        "a daemon hands over while a claim waits": (
            0,
            "the controller of compute domains stops; a pod with a channel comes+3; a successor starts+11",
        ),
        "kubelet stops in the moment in which a domain's daemon is deleted": (
            8969469884,
            "a pod with all channels comes@341+70; the API server is overloaded@214+0.05; a pod with a claim "
            "is force-deleted, has a successor and dies late@554; a pod with a channel is force-deleted and "
            "another domain gets it@255+0.05; the daemons of domains are not ready@179+0.001; a claim is "
            "deleted at the API server@370+11; a pod with a channel comes@140; the clock jumps@334; kubelet "
            "stops@215+0.3",
        ),
        "a claim is deleted under its pod while no kubelet runs, and two minutes pass": (
            29977709,
            "a pod with a channel comes; a pod with a claim is force-deleted, has a successor and dies late+3; "
            "a claim is deleted at the API server; kubelet stops; a successor starts; "
            "somebody removes the label of the node+0.3; the clock jumps+70",
        ),
        "the checkpoint is lost under a claim whose domain is deleted when the label is gone": (
            12119138763,
            "a pod with a channel comes@123; the clock jumps@466+3; a daemon crashes@505+0.05; "
            "an answer of the API server is lost@23; the checkpoint is lost@294; "
            "somebody removes the label of the node@345; the API server answers with a conflict@569+70; "
            "a compute domain is deleted@556+0.3",
        ),
        "a call is held for a successor that dies, and the API server is away": (
            1074967788,
            "a successor starts; a daemon crashes@293; a pod with a channel comes; the slices are deleted+0.001; "
            "the API server goes away",
        ),
        "a slice is edited and deleted before the bookmark of a watch that is read late": (
            9403305882,
            "a pod with a channel comes; a pod with a claim is force-deleted, has a successor and dies late; "
            "a slice is edited; the slices are deleted; the clock jumps",
        ),
        "somebody sets the label to the domain of a claim that nobody knows any more": (
            11070262056,
            "a pod with a channel comes@72; the controller of compute domains stops@22+3; "
            "the controller of compute domains goes on@562; a claim is deleted at the API server@114+0.001; "
            "the daemon is told to stop@571+3; the checkpoint is corrupt@47+0.3; "
            "somebody sets the label to what no claim has@425; a daemon starts@381; kubelet stops@566+11; "
            "kubelet loses its claims@95+3; somebody sets the label to another domain@139+11",
        ),
        "a domain is deleted, and after a reboot kubelet asks for ever for a claim of it": (
            10732955473,
            "a pod with a channel comes+3; a compute domain is deleted; the node reboots; a successor starts+70; "
            "a pod with a channel comes+0.001; a pod with a claim ends@1",
        ),
    }.items()
}
"""The same on nodes with compute domains."""


FOUND_WITH_ADMINISTRATORS: Final[dict[str, tuple[int, Script]]] = {
    name: (ADMINISTERED | CLAIMS | seed, parse_script(script))
    for name, (seed, script) in {
        "a card that is bound to vfio-pci after a claim stays there after the next one": (
            0,
            "a pod with a claim comes@3+30; a pod with a claim ends+30; "
            "an administrator binds a card to vfio-pci@3+5; a pod with a claim comes@3+30; a pod with a claim ends+30",
        ),
        "it stays there as well if its host driver is not loaded any more": (
            0,
            "a pod with a claim comes@3+30; a pod with a claim ends+30; "
            "an administrator binds a card to vfio-pci@3+5; an administrator unloads nvidia; "
            "a pod with a claim comes@3+30; a pod with a claim ends+30",
        ),
        "a card that went to vfio-pci and back is returned to its host driver": (
            0,
            "an administrator binds a card to vfio-pci@3+5; an administrator binds a card to its host driver@3+5; "
            "a pod with a claim comes@3+30; a pod with a claim ends+30",
        ),
        "a card of vfio-pci goes to the driver that is loaded first": (
            0,
            "an administrator unloads nvidia+3; an administrator unloads vfio-pci+3; an administrator loads nvidia+3",
        ),
        "a pre-bound card that is given to its host driver is returned to it": (
            107,
            "an administrator binds a card to its host driver@2; a pod and a claim race for a card@2",
        ),
        "a return waits for the driver that is unloaded under the claim": (
            0,
            "a pod with a claim comes@3+30; an administrator unloads nvidia+3; a pod with a claim ends+70; "
            "an administrator loads nvidia+70",
        ),
        "the checkpoint and the CDI files are lost, and the pod of a claim is deleted by force": (
            24721659037,
            "a pod with a claim comes@2; a write to sysfs is slow+0.001; an administrator removes the CDI directory; "
            "a daemon crashes; the checkpoint is lost; a daemon starts+3; "
            "a pod with a claim is force-deleted and has a successor+0.001",
        ),
        "the checkpoint is lost after a reboot, and kubelet lists a claim whose GPU is not bound any more": (
            21852948909,
            "a pod comes; a pod with a claim comes@2+0.001; the node reboots; "
            "an administrator removes the checkpoint under the daemon",
        ),
        "a driver that waits for its last user disables the virtual functions as it goes": (
            22074544083,
            "an administrator starts virtual functions@4; a process uses a card by its host driver@4; "
            "an administrator writes the id of a card to vfio-pci@46",
        ),
        "the checkpoint is lost, a claim's card is unbound by hand, and its pod is deleted by force": (
            25232518503,
            "a pod with a claim comes@22; an administrator binds a card to vfio-pci@284+0.3; "
            "an administrator saves the slices@254+0.001; "
            "an administrator unbinds a card under its virtual machine@286+0.05; "
            "an administrator removes the checkpoint under the daemon@386+0.3; a successor starts@592; "
            "an administrator brings back the slices that he saved@545+0.3; "
            "a pod with a claim is force-deleted and has a successor@77; an external process opens a card@116+0.001",
        ),
        "the checkpoint is removed before a reboot, and a pod gets the GPU before kubelet lists the claim": (
            24752495771,
            "a pod with a claim comes@128+0.001; an administrator removes the checkpoint under the daemon@550+0.3; "
            "a pod comes@251+0.05; the node reboots@529+70; a pod is force-deleted@241+70",
        ),
        "the checkpoint is removed while a write of the daemon before hangs, and another claim gets the card": (
            23682481992,
            "a pod with a claim comes@519+0.001; a write to sysfs hangs@31+0.05; a pod ends@464; "
            "an administrator saves the slices@486+3; the daemon is told to stop@501; a daemon starts@113; "
            "an administrator removes the checkpoint under the daemon@105+0.3; a pod with a claim comes@189+0.3",
        ),
        "the checkpoint is removed while a bind hangs, which goes on with the companion": (
            24823323765,
            "a write to sysfs hangs; a pod with a claim comes@3+0.001; "
            "an administrator removes the checkpoint under the daemon; a successor starts",
        ),
        "of a claim's two binds one fails after a restart, and the other goes on": (
            24845063074,
            "an administrator unloads vfio-pci@354+0.3; a pod with a claim for two cards comes@494+0.3; "
            "an administrator loads vfio-pci@529+3; a write to sysfs fails with EBUSY@379+11; "
            "a successor starts@290+0.05",
        ),
        "a claim waits for the end of one of two cards, whose other card an external process has open": (
            22246114056,
            "a pod with a claim comes@2+0.001; a pod with a claim for two cards comes@3+0.001; "
            "a write to sysfs hangs; a pod is force-deleted; a pod with a claim ends+70; "
            "an external process opens a card@4",
        ),
        "an unbind that waits for a user of the card goes on with no write that hung": (
            23949874799,
            "a process uses a card by its host driver@3; an administrator writes the id of a card to vfio-pci@189; "
            "a pod with a claim comes@3; writes that hang go on+0.001; a pod ends+0.3; the node reboots",
        ),
        "the uevent of a claim's bind comes late, when the GPU is being unbound under its virtual machine": (
            22943386053,
            "the next uevents are late; a pod with a claim comes@4+0.001; "
            "an administrator unbinds a card under its virtual machine@4+0.001",
        ),
    }.items()
}
"""On nodes with claims and a second administrator."""


FOUND_WITH_FABRIC: Final[dict[str, tuple[int, Script]]] = {
    name: (seed, parse_script(script))
    for name, (seed, script) in {
        "a pod gets two devices that are no partition while the partition of one of them is released": (
            553816478469,
            "a pod for two cards comes; a pod for two cards comes+0.001; kubelet stops; unbind slowly",
        ),
        "the first list after a restart names one more device of a pod that has no partition": (
            550350130711,
            "a pod for two cards comes+0.3; a daemon crashes; a virtual machine ends by itself; "
            "the clock jumps+0.3; a pod for two cards comes; unbind slowly; the next partition command fails+0.001",
        ),
        "a pod's virtual machine has ended, and an external process has one card of its partition open": (
            549946977743,
            "a pod for two cards comes+0.001; a pod is force-deleted and dies late; "
            "an external process opens a card",
        ),
        "a container is to start after a restart of the fabric manager, and the first query lies": (
            553830876952,
            "a pod for two cards comes+0.001; kubelet stops+0.3; the fabric manager restarts; "
            "the next query is wrong about a partition@38; a pod for two cards comes; kubelet starts; "
            "a pod is force-deleted and dies late@5+11",
        ),
    }.items()
}
"""On nodes that activate partitions of an NVLink fabric."""


FOUND_WITH_KATA: Final[dict[str, tuple[int, Script]]] = {
    name: (seed, parse_script(script))
    for name, (seed, script) in {
        # All cards were Unhealthy until the successor's first write, that of the pod as well.
        "a successor takes over while a pod comes, and writes of CDI files take long": (
            2202398841624,
            "a successor starts; writes of CDI files take long; a pod comes+0.001",
        ),
        "a card comes back while its CDI file is being written without it, and a pod gets it": (
            2199023255553,
            "polls take long+3; writes of CDI files take long; unbind+0.3; bind to vfio-pci+0.4; "
            "pods come in a burst+3",
        ),
        "a pod ends that had a card by its old name, and the new one is no CDI kind": (
            2201274105492,
            "a pod comes; a daemon crashes@121+0.001; the next daemon has another pci.ids; kubelet stops; a pod ends; "
            "pods come in a burst",
        ),
    }.items()
}
"""On nodes whose daemons answer by CDI names."""
FOUND_WITH_DEAD: Final[dict[str, tuple[int, Script]]] = {
    name: (seed, parse_script(script))
    for name, (seed, script) in {
        "a silent companion is unplugged while an Allocate waits for the inspection that has seen it": (
            1100938002213,
            "a card counts a fatal error@1; only the port above counts the fatal error of a card; "
            "plug a companion@2+0.001; a card falls silent@272; inspections and scans take long; a pod comes+0.001; "
            "unplug the companion@2",
        ),
        # It was reserved by what was known before the inspection failed, and bound.
        "a claim comes for a silent card, whose inspection fails": (
            1103819715071,
            "inspections fail+0.3; a card falls silent@3; a pod with a claim comes@3+11",
        ),
    }.items()
}
"""On nodes whose cards die."""


@dataclass(frozen=True, slots=True)
class Known:
    """A fault that histories find and that is not repaired yet."""

    check: str
    pattern: str
    """A regular expression for the failure's text."""
    why: str
    script: Script
    """A short history that shows it."""

    def matches(self, failure: Failure) -> bool:
        """Whether a failure is this fault."""
        return failure.check == self.check and re.search(self.pattern, failure.text) is not None


KNOWN: Final[tuple[Known, ...]] = ()
"""A campaign counts these, and does not fail. The list should be empty."""


def known(failure: Failure) -> Known | None:
    """Which known fault a failure is; None if it is a new one."""
    return next((fault for fault in KNOWN if fault.matches(failure)), None)
