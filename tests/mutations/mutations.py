"""Bugs to plant, each a change of a few words in one file: an await moved, a conflation dropped, a check removed.

Each is a bug that somebody could make, in the words of what goes wrong. `before` occurs exactly once in its file; where
the program has changed, the runner says so and the mutation is to be written anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

INDEX: Final = "tests/core/test_index.py"
EXCLUSION: Final = "tests/core/gpus/test_exclusion.py"
PREPARE: Final = "tests/core/claims/test_prepare.py"
FORCED: Final = "tests/core/claims/test_force_deletion.py"
YOUNG: Final = "tests/core/test_young_kubelet.py"

VIRTUAL: Final = "tests/core/test_virtual_functions.py"
CONTAINER: Final = "tests/core/gpus/test_gpu_of_a_container.py"
CHANGES: Final = "tests/core/claims/test_slice_changes.py"
POOL: Final = "tests/core/claims/test_pool.py"
WRITES: Final = "tests/core/claims/test_slice_writes.py"
PUBLISHER: Final = "tests/actors/test_slice_publisher.py"
NVIDIA: Final = "tests/host/test_nvidia.py"

FOUND: Final = "tests/histories/test_histories.py::test_a_found_history_stays_found"
"""Histories by name: what a planted bug breaks at once may take a campaign some thousands of others to come upon."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One bug."""

    name: str
    file: str
    """Below `src/gpuactors/`."""
    before: str
    after: str
    tests: tuple[str, ...] = ()
    """Tests that are nearer to it than any order of events: what pytest is to run first. Some bugs no world can show,
    as its kubelet, its threads or its file system are not real."""


MUTATIONS: Final = (
    # --- ledger and use ------------------------------------------------------------------------------------------
    Mutation(
        "a poll of some groups is taken for one of all",
        "core/host/usage.py",
        "        refresh=before.refresh.answered(due_at if of_all else min(due_at, before.due_at)),\n",
        "        refresh=before.refresh.answered(due_at),\n",
        tests=("tests/core/test_polls.py",),
    ),
    Mutation(
        "a group that a poll was not of counts as polled",
        "core/values/model.py",
        "        asked = self.outstanding is not None and (self.of is None or group in self.of)\n"
        "        return asked or (self.refresh.again",
        "        asked = self.outstanding is not None and (self.of is None or group in self.of)\n"
        "        return asked or False and (self.refresh.again",
        tests=("tests/core/test_polls.py",),
    ),
    Mutation(
        "what is asked for while a request is outstanding is taken for answered by it",
        "core/requests.py",
        "            return replace(self, again=True, due_at=math.inf)\n",
        "            return self\n",
        tests=("tests/core/test_refresh.py", "tests/core/test_inspections.py"),
    ),
    Mutation(
        "callers without end put off the poll of all groups",
        "core/host/schedule.py",
        "    if state.host.polls.due_at <= at:\n",
        "    if state.host.polls.due_at <= at and state.host.polls.outstanding is None:\n",
        tests=("tests/core/test_polls.py",),
    ),
    Mutation(
        "an allocated GPU that is held is Unhealthy",
        "core/assessment/assess.py",
        "        if device.function.vfio_bound:\n            return Health.HEALTHY, ownership.cause",
        "        if device.function.vfio_bound:\n"
        "            busy = listed(device) is not None and use is not None and use.in_use\n"
        "            return (Health.UNHEALTHY if busy else Health.HEALTHY), ownership.cause",
    ),
    Mutation(
        "no tombstone: a GPU that is gone under its pod leaves the list",
        "core/deviceplugin/device_lists.py",
        "        if not (lost := frozenset(ids).difference(of_resource)):\n",
        "        if not (lost := set[DeviceId]()):\n",
    ),
    Mutation(
        "a device's assessment is not derived again when another of its group is given away",
        "core/devices/inventory.py",
        "    return address if function.iommu_group is None else function.iommu_group\n",
        "    return address\n",
        tests=("tests/core/assessment/test_assessments.py",),
    ),
    Mutation(
        "a device's assessment is not derived again when kubelet's ledger was read since it is in use",
        "core/assessment/assessments.py",
        "        and before.ledger == ledger\n",
        "",
        tests=("tests/core/test_ledger_and_usage.py",),
    ),
    Mutation(
        "a device's assessment is not derived again when a poll came after the read that its pod was gone from",
        "core/assessment/assessments.py",
        "        and before.seen is seen\n",
        "",
        tests=("tests/core/test_ledger_and_usage.py",),
    ),
    Mutation(
        "a GPU whose unbind waits leaves the list while somebody has it open",
        "core/deviceplugin/entries.py",
        "    if device.function.vfio_bound or is_unbinding(device.function, use_of(state, device)):\n",
        "    if device.function.vfio_bound:\n",
    ),
    Mutation(
        "a GPU that has lost its driver leaves the list before it is known whether it is open",
        "core/deviceplugin/entries.py",
        "    return may_be_unbinding(device.function) and _is_listed(state, device) and not _is_polled(state, device)\n",  # noqa: E501
        "    return False\n",
    ),
    Mutation(
        "lists shrink during calls",
        "core/deviceplugin/device_lists.py",
        "    if in_call or blind or state.calls.no_removal_until.get(resource, at) > at:\n",
        "    if blind or (not in_call and state.calls.no_removal_until.get(resource, at) > at):\n",
    ),
    Mutation(
        "what was handed out and is not in the ledger yet is nobody's",
        "core/deviceplugin/calls.py",
        "            state = _with_pending(state, call, at)\n",
        "            pass\n",
    ),
    Mutation(
        "nobody remembers who has just left",
        "core/ledger/ledger.py",
        "    orphans = {**_still_orphans(after), **left}\n",
        "    orphans: dict[PciAddress, Orphan] = {}\n",
    ),
    Mutation(
        "a group's other members are not asked for an owner",
        "core/values/group.py",
        "    for function, owner in sorted(owned, key=lambda pair: pair[0] != address):\n",
        "    for function, owner in (pair for pair in owned if pair[0] == address):\n",
    ),
    Mutation(
        "a GPU that an external process holds is handed out",
        "core/deviceplugin/calls.py",
        "    if use is None or not use.in_use:\n        return None\n    # Kubelet",
        "    if True:\n        return None\n    # Kubelet",
    ),
    Mutation(
        "what is at a device's address at the start is believed to be what was given away",
        "core/ledger/identity.py",
        "    if not ids or not known or ids in known:\n",
        "    if True:\n",
        (
            "tests/core/test_identity.py",
            f"{FOUND}[a card is swapped for another model while no daemon runs]",
        ),
    ),
    Mutation(
        "a group is opened as a probe while a pod has a member of it that lost its driver",
        "core/reports/snapshot.py",
        "given.isdisjoint(m.address for m in index.groups[group])",
        "given.isdisjoint(functions)",
        (
            "tests/core/test_ledger_and_usage.py",
            f"{FOUND}[both cards of a group are released, and the one that is given to the next pod is unbound]",
        ),
    ),
    Mutation(
        "the gate is open: a start waits for nobody",
        "core/deviceplugin/calls.py",
        "            return None if _held(state, call) else Ready()\n",
        "            return Ready()\n",
    ),
    Mutation(
        "a ledger that was read before the first scan is not read again",
        "core/host/schedule.py",
        "    if inspected and ledger.due_at > at + limits.LEDGER_S and matters(state):\n",
        "    if False and matters(state):\n",
        tests=("tests/core/test_ledger_and_usage.py",),
    ),
    Mutation(
        "any other text in the ledger is another pod",
        "core/ledger/ledger.py",
        "        if n in had and n in state.kubelet.resolved and _is_gone(had[n], entries.get(n))\n",
        "        if n in had and n in state.kubelet.resolved\n",
        tests=("tests/core/test_ledger_and_usage.py",),
    ),
    Mutation(
        "the read wished after an Allocate is lost if a read is out",
        "core/host/schedule.py",
        "    listed = (until if ledger.read_at >= listed_at(until) else listed_at(until) for until in grants)\n",
        "    listed = tuple(grants)\n",
        tests=("tests/core/test_ledger_asked.py", "tests/core/test_ledger_and_usage.py"),
    ),
    Mutation(
        "an old poll clears who has just left",
        "core/host/usage.py",
        "        if now is None or polls.seen[group].poll <= orphan.read or (now.in_use and _may_be(orphan, now)):\n",
        "        if now is None or (now.in_use and _may_be(orphan, now)):\n",
        tests=("tests/core/test_ledger_and_usage.py",),
    ),
    Mutation(
        "another resource's pod is no owner at Allocate",
        "core/deviceplugin/calls.py",
        "            return (entry.resource, entry.device) == (call.resource, asked_as)\n",
        "            return True\n",
        tests=(f"{FOUND}[another takes a card just before it is asked for]",),
    ),
    Mutation(
        "a device that another resource gives away as well is not counted in ours",
        "core/values/owner.py",
        "        if not causes:\n",
        "        if any(e.resource != resource for e in self.entries):\n",
    ),
    Mutation(
        "what an ID means is looked up anew at each read",
        "core/ledger/identity.py",
        "    unknown = [*index.unresolved, *(n for n in pending if n not in before)]\n",
        "    unknown = [*state.kubelet.ledger.entries, *pending]\n",
    ),
    # --- a view that is old is not a fact -------------------------------------------------------------------
    Mutation(
        "Allocate is answered from the ledger as it was read last",
        "core/deviceplugin/calls.py",
        "    return call.doubts or not _is_fresh(state.kubelet.ledger.read_at, call)\n",
        "    return False\n",
        tests=(f"{FOUND}[a claim takes a card just before it is asked for]",),
    ),
    Mutation(
        "Allocate is refused for an owner in a ledger from before the call",
        "core/deviceplugin/calls.py",
        "            if taken:\n                if state.kubelet.ledger.done <= call.since:\n",
        "            if taken:\n                if False:\n",
        tests=("tests/core/test_ledger_asked.py",),
    ),
    Mutation(
        "on a quiet node the ledger is never read",
        "core/ledger/ledger.py",
        "    due_at = at + (period_s if schedule.matters(state) else limits.LEDGER_QUIET_S)\n",
        "    due_at = at + (period_s if schedule.matters(state) else math.inf)\n",
        tests=(f"{FOUND}[a claim takes a card while nothing of ours is given away]",),
    ),
    Mutation(
        "the other GPUs of an allocated GPU's group are not chosen last",
        "core/deviceplugin/allocation.py",
        "for last in ((busy, taken), (taken,), ((),)))\n",
        "for last in ((busy,), ((),)))\n",
        tests=("tests/core/test_ledger_asked.py",),
    ),
    Mutation(
        "the answer that changes a list for others leaves with the list",
        "kubelet/device_plugin.py",
        "            await trio.sleep(limits.LIST_HANDLED_S)\n",
        "            pass\n",
        tests=("tests/kubelet/test_device_plugin.py",),
    ),
    Mutation(
        "a grant names the lists of its own resource alone",
        "core/deviceplugin/calls.py",
        "        others = tuple(sorted(r for r, found in changed.items() if _is_others(r, found, own)))\n",
        "        others = tuple(r for r, f in changed.items() if r == call.resource and _is_others(r, f, own))\n",
        tests=("tests/core/test_calls.py",),
    ),
    Mutation(
        "the answer to Allocate leaves before the list",
        "kubelet/device_plugin.py",
        "        await self._sent.wait(self._device_lists.version)\n",
        "",
        tests=("tests/kubelet/test_device_plugin.py",),
    ),
    # --- the use of a group ---------------------------------------------------------------------------------
    Mutation(
        "baseline never goes back to 0",
        "core/host/bindings.py",
        "    baselines = {**polls.baselines, **{a: n for a, n in sure.items() if a not in active}}\n",
        "    baselines = {**polls.baselines, **{a: n for a, n in sure.items() if a not in active and n}}\n",
        tests=("tests/core/test_ledger_and_usage.py",),
    ),
    Mutation(
        "a baseline outlives the function's binding",
        "core/host/bindings.py",
        "            baselines={a: n for a, n in polls.baselines.items() if a not in baselines},\n",
        "            baselines=polls.baselines,\n",
        tests=("tests/core/test_ledger_and_usage.py",),
    ),
    # --- the control socket ---------------------------------------------------------------------------------
    Mutation(
        "who watches is told of what only grows older",
        "control/server.py",
        "            self._derived = state, view_of(state, AGELESS)\n",
        "            self._derived = state, view_of(state, trio.current_time())\n",
        tests=("tests/control/test_watch.py::test_each_change_is_told_and_what_only_grows_older_is_not",),
    ),
    Mutation(
        "another holder's name makes a new state of a GPU",
        "control/view.py",
        "        if (change.health, change.cause) != (found.health if found.listed else None, found.cause):\n",
        "        if change is not found.history[-1]:\n",
        tests=("tests/control/test_times.py::test_since_is_the_change_of_the_cause_and_not_of_its_words",),
    ),
    # --- inspections ----------------------------------------------------------------------------------------
    Mutation(
        "an older inspection overwrites what a later one found",
        "core/host/inspections.py",
        "        if before is not None and before.inspection > number:\n",
        "        if False:\n",
    ),
    Mutation(
        "a hint that comes during an inspection is forgotten",
        "core/host/inspections.py",
        "    return ask_inspections(inspections, (address,)) if refresh.again else inspections\n",
        "    return inspections\n",
    ),
    Mutation(
        "a scan that is wanted while one is out is forgotten",
        "core/host/inspections.py",
        "    return ask_scan(inspections) if again else inspections\n",
        "    return inspections\n",
        tests=("tests/core/test_inspections.py",),
    ),
    Mutation(
        "what came back incomplete is not inspected again",
        "core/host/inspections.py",
        "        if failed or not complete:  # with growing waits, without end\n",
        "        if failed and not complete and function is None:\n",
    ),
    Mutation(
        "no scan after uevents were lost",
        "core/step.py",
        "            return _rescanned(state, uevents=state.host.uevents), [\n"
        '                Log(Level.WARNING, "uevents.lost"',
        '            return state, [\n                Log(Level.WARNING, "uevents.lost"',
    ),
    Mutation(
        "no scan when the socket of uevents is open at last",
        "core/step.py",
        '            return _rescanned(state, uevents=""), [',
        '            return replace(state, host=replace(state.host, uevents="")), [',
    ),
    # --- kubelet --------------------------------------------------------------------------------------------
    Mutation(
        "the end of kubelet's stream is no reason to register",
        "core/deviceplugin/registration.py",
        "    return _lost(plugin, at) if absence is None else replace(plugin, accepted=False, problem=absence)\n",
        "    return plugin\n",
    ),
    Mutation(
        "a failed Register is not repeated while a stream is open",
        "core/deviceplugin/registration.py",
        "        retry_at=at + _backoff(limits.REGISTER_BACKOFF_S, failures),\n",
        "        retry_at=None if plugin.streams else at + _backoff(limits.REGISTER_BACKOFF_S, failures),\n",
    ),
    Mutation(
        "an old answer to Register counts",
        "core/deviceplugin/registration.py",
        "    if register != plugin.register or not plugin.registering:\n        return plugin\n"
        "    plugin = replace(plugin, registering=False, accepted=True)\n",
        "    plugin = replace(plugin, registering=False, accepted=True)\n",
        tests=("tests/core/test_registration.py::test_only_the_last_order_to_register_can_be_answered",),
    ),
    Mutation(
        "an order to register is passed over",
        "actors/plugin.py",
        "            if current.register > registered.value:\n",
        "            if current.register > registered.value + 1:\n",
    ),
    Mutation(
        "a socket that kubelet has swept away is taken for there",
        "actors/plugin.py",
        "                if current.renew or not endpoint.still_there():\n",
        "                if current.renew:\n",
    ),
    Mutation(
        "calls in flight are cut off when a stream is ended",
        "actors/plugin.py",
        "                await endpoint.drain(limits.DRAIN_S)\n",
        "                await endpoint.drain(0.0)\n",
    ),
    Mutation(
        "kubelet.sock's identity is its inode alone",
        "grpc_trio/unix.py",
        '    return SocketFile(f"{found.st_dev}:{found.st_ino}:{found.st_mtime_ns}", ',
        '    return SocketFile(f"{found.st_dev}:{found.st_ino}", ',
        tests=("tests/kubelet/test_kubelet_socket.py",),
    ),
    Mutation(
        "Register does not wait for kubelet to hang up",
        "actors/plugin.py",
        "    with trio.move_on_after(limits.DISCONNECT_WAIT_S):\n"
        "        await endpoint.wait_disconnected()\n    try:\n",
        "    try:\n",
        tests=("tests/actors/test_plugin.py",),
    ),
    Mutation(
        "a kubelet that has just started is believed to know every pod",
        "core/ledger/young_kubelet.py",
        "    more = tuple(e for e in named if (e.resource, e.device) not in listed_before)\n",
        "    more: tuple[LedgerEntry, ...] = ()\n",
        tests=(YOUNG,),
    ),
    Mutation(
        "what a kubelet has listed counts again once it has ended, as the file names it still",
        "core/ledger/young_kubelet.py",
        "        listed_before = young.listed\n",
        "",
        tests=(YOUNG,),
    ),
    Mutation(
        "a kubelet is taken for the one before it",
        "core/ledger/young_kubelet.py",
        "    is_new = kubelet.socket != young.socket\n",
        "    is_new = young.socket is None\n",
        tests=(YOUNG,),
    ),
    Mutation(
        "where a young kubelet's file cannot be read, what was known before does not count",
        "core/ledger/young_kubelet.py",
        "event.file is not None else _entries(known)\n",
        "event.file is not None else ()\n",
        tests=(YOUNG,),
    ),
    Mutation(
        "the file counts for some seconds only, whether kubelet knows its pods or not",
        "core/ledger/young_kubelet.py",
        "    if young.settled_at < math.inf or not knows:\n",
        "    if young.settled_at < math.inf:\n",
        tests=(f"{FOUND}[kubelet restarts while the API server is away]", YOUNG),
    ),
    Mutation(
        "the ledger's file is not read beside PodResources",
        "kubelet/ledger.py",
        "        file = await self._beside()\n",
        "        file = None\n",
        tests=("tests/kubelet/test_ledger.py",),
    ),
    Mutation(
        "each read of an old kubelet is another one, as it is older",
        "kubelet/ledger.py",
        "min(socket.age_s, limits.LEDGER_SETTLE_S)",
        "socket.age_s",
        tests=("tests/kubelet/test_ledger.py",),
    ),
    Mutation(
        "a plugin crashes where nobody listens on kubelet.sock",
        "kubelet/kubelet.py",
        "        except Exception as exc:\n            problem",
        "        except OSError as exc:\n            problem",
        tests=("tests/kubelet/test_register.py",),
    ),
    Mutation(
        "a kubelet.sock that is another one is not told of",
        "kubelet/sockets.py",
        "            if now != kubelet or changed:\n",
        "            if changed:\n",
        tests=(f"{FOUND}[new model while kubelet restarts]",),
    ),
    Mutation(
        "a container starts with the nodes that kubelet has kept, whatever is behind them now",
        "core/deviceplugin/calls.py",
        "            if stale := _stale(state, call, known):\n",
        "            if stale := '':\n",
        tests=(f"{FOUND}[groups have other numbers after a reboot]",),
    ),
    Mutation(
        "kubelet's own list is not compared with ours",
        "core/step.py",
        "listing.compared(after, event.read, event.healthy, at)",
        "listing.compared(after, event.read, None, at)",
        tests=(f"{FOUND}[a second plugin on our resource comes, and goes]",),
    ),
    # --- the index: what is derived once, and carried along -------------------------------------------------
    Mutation(
        "an owner is as it was before the last read of the ledger",
        "core/devices/holdings.py",
        "    if before.names is names and before.entries is entries and same_claims:\n",
        "    if before.names is names and same_claims:\n",
        tests=(INDEX,),
    ),
    Mutation(
        "a claim that has ended is an owner for ever",
        "core/devices/holdings.py",
        "        before.claims is claims\n",
        "        before.claims.keys() >= claims.keys()\n",
        tests=(INDEX,),
    ),
    Mutation(
        "each group looks through all functions",
        "core/devices/inventory.py",
        "same_if_equal(before.get(group), tuple(found))",
        "same_if_equal(before.get(group), tuple(f for f in functions.values() if f.iommu_group == group))",
        tests=(
            f"{INDEX}::test_a_start_goes_through_the_functions_a_few_times_however_many_groups_they_are_in",
        ),
    ),
    Mutation(
        "a device keeps the group that it had, whoever has come into it",
        "core/devices/inventory.py",
        " or was.group != group:\n",
        ":\n",
        tests=(INDEX,),
    ),
    Mutation(
        "a function that has turned into another model keeps its name",
        "core/values/remade.py",
        "    return {**before, **made} if",
        "    return {**made, **before} if",
        tests=(INDEX,),
    ),
    Mutation(
        "a function that begins to leave its driver is polled as before",
        "core/devices/index.py",
        "        if same_devices and before.leaving == leaving\n",
        "        if same_devices\n",
        tests=(INDEX,),
    ),
    Mutation(
        "an ID is not known before something else changes",
        "core/devices/index.py",
        " and before.aliases is meant.aliases",
        "",
        tests=(INDEX,),
    ),
    Mutation(
        "a list has what a device was before it was assessed otherwise",
        "core/deviceplugin/entries.py",
        "    of_devices = remade(before.of_devices, before.rows, rows, _entry, ne)\n",
        "    of_devices = remade(before.of_devices, before.rows, rows, _entry, lambda was, now: was[0] != now[0])\n",
        tests=("tests/core/test_device_lists.py", INDEX),
    ),
    Mutation(
        "a list keeps a device under the name that it had",
        "core/deviceplugin/entries.py",
        "        map(ids.get, devices),\n",
        "        map(before.ids.get, devices),\n",
        tests=("tests/core/test_device_lists.py", INDEX),
    ),
    Mutation(
        "whether an unbind waits is not asked again after a poll",
        "core/deviceplugin/entries.py",
        "for address in state.index.unbinding}\n",
        "for address in state.index.unbinding - before.rows.keys()}\n",
        tests=("tests/core/test_polls.py", "tests/core/test_ledger_and_usage.py"),
    ),
    # --- actors and their tools -----------------------------------------------------------------------------
    Mutation(
        "a reader misses what is set while it is not waiting",
        "concurrency/latest.py",
        "        while self._seen == self._latest._version:\n",
        "        first = self._seen == -1\n        while self._seen == self._latest._version or not first:\n"
        "            first = True\n",
    ),
    Mutation(
        "a reader that is slow gets what was there when it was woken, not the last value",
        "concurrency/latest.py",
        "            await self._latest._changed.wait()\n        self._seen = self._latest._version\n"
        "        return self._latest._value\n",
        "            await self._latest._changed.wait()\n        self._seen = self._latest._version\n"
        "        value = self._latest._value\n        await trio.sleep(0)\n        self._seen = self._latest._version\n"
        "        return value\n",
    ),
    Mutation(
        "a poll is done again under its old number",
        "actors/busy_poller.py",
        "        return (GroupsObserved if now.whole else SomeGroupsObserved)(number, uses)\n",
        "        await trio.sleep(3)\n        return GroupsObserved(number - 1, uses)\n",
    ),
    Mutation(
        "the inspector does one inspection after the other",
        "concurrency/each_once.py",
        "                    nursery.start_soon(all_of, key)\n",
        "                    await all_of(key)\n",
        tests=("tests/actors/test_sysfs_inspector.py",),
    ),
    Mutation(
        "the watcher ends at the first overflow",
        "actors/udev_watcher.py",
        "            await inbox.send(UeventsLost(str(exc)))\n            continue\n",
        "            await inbox.send(UeventsLost(str(exc)))\n            await trio.sleep_forever()\n",
    ),
    Mutation(
        "the end of a stream is not told where its handler was cancelled",
        "actors/caller.py",
        "        with trio.move_on_after(limits.STREAM_END_POST_S, shield=True):\n",
        "        with trio.move_on_after(limits.STREAM_END_POST_S):\n",
        tests=("tests/actors/test_caller.py::test_the_end_of_a_cancelled_handler_is_posted",),
    ),
    Mutation(
        "the new daemon serves before the old one has ended its streams",
        "actors/hand_over.py",
        "    await _until(ports.running, lambda names: not names)\n",
        "    await trio.lowlevel.checkpoint()\n",
        tests=("tests/actors/test_hand_over.py",),
    ),
    Mutation(
        "an old daemon does not come back when its successor dies",
        "actors/hand_over.py",
        "        gone_for_s = 0.0 if await ports.control.is_held() else gone_for_s + limits.SUCCESSOR_CHECK_S\n",
        "        gone_for_s = 0.0 if await ports.control.is_held() else gone_for_s\n",
        tests=("tests/actors/test_hand_over.py::test_a_successor_that_has_gone_is_replaced",),
    ),
    Mutation(
        "whoever listens on the control socket is taken for nobody: no daemon is asked to hand over",
        "control/client.py",
        "                if owner_of(path) is None:\n",
        "                if owner_of(path) is not None:\n",
        tests=(f"{FOUND}[a daemon starts while the class of an allocated card cannot be read]",),
    ),
    Mutation(
        "a successor is answered before the socket is given up",
        "control/server.py",
        "        await self.released.wait()\n",
        "        await trio.lowlevel.checkpoint()\n",
        tests=("tests/control/test_socket.py",),
    ),
    Mutation(
        "a daemon that hangs keeps its sockets",
        "control/unix.py",
        "                        self._hanging.set(frozenset({owner}))\n",
        "                        pass\n",
        tests=("tests/control/test_socket.py",),
    ),
    # --- the API server ------------------------------------------------------------------------------------------
    Mutation(
        "a device that must not be given away is offered while it is not known whether taints are kept",
        "core/claims/pool.py",
        "keeps is ServerKeepsTaints.YES:",
        "keeps is not ServerKeepsTaints.NO:",
        tests=(POOL,),
    ),
    Mutation(
        "the device of a live claim is withdrawn",
        "core/claims/pool.py",
        "        elif offered.claimed:\n",
        "        elif False:\n",
        tests=(POOL,),
    ),
    Mutation(
        "two slices of a pool are changed within one generation",
        "core/claims/slice_writes.py",
        "    if not kept or len(changed) + _too_many(pool, stored, mine, generation) > 1:\n",
        "    if not kept:\n",
        tests=(WRITES,),
    ),
    Mutation(
        "a slice that is too many counts until it is deleted",
        "core/claims/slice_writes.py",
        "    if not kept or len(changed) + _too_many(pool, stored, mine, generation) > 1:\n",
        "    if not kept or len(changed) > 1:\n",
        tests=(WRITES,),
    ),
    Mutation(
        "what the server makes of a write is written again, for ever",
        "core/claims/slice_writes.py",
        "    return stored.spec == wanted or answers.get(stored.name) == Answered(wanted, stored.spec)\n",
        "    return stored.spec == wanted\n",
        tests=(WRITES,),
    ),
    Mutation(
        "the time of a taint is set anew at each write",
        "core/claims/slice_writes.py",
        "times.get((device.name, t), t.time_added)",
        "None",
        tests=(WRITES,),
    ),
    Mutation(
        "slices are compared before the watch has shown what was written",
        "actors/slice_publisher.py",
        "        self._awaited[name] = version\n",
        "        pass\n",
        tests=(PUBLISHER,),
    ),
    Mutation(
        "a write that drops the taints does not say so",
        "actors/slice_publisher.py",
        "            self._keeps = ServerKeepsTaints.NO\n            # Not",
        "            # Not",
        tests=(PUBLISHER,),
    ),
    Mutation(
        "who edits the slices for ever is answered at once for ever",
        "actors/slice_publisher.py",
        "            if pause_s > 0.0:\n                return pause_s\n",
        "            pass\n",
        tests=(PUBLISHER,),
    ),
    Mutation(
        "a watch that is too old is the end of watching",
        "kube/watch.py",
        "            if exc.code != _GONE:\n",
        "            if exc.code != 0:\n",
        tests=("tests/kube/test_slices.py",),
    ),
    Mutation(
        "any 404 means that the claim is gone",
        "kube/claims.py",
        '        and (said.kind, said.name) == ("resourceclaims", claim.name)\n',
        "",
        tests=("tests/kube/test_client.py",),
    ),
    Mutation(
        "an empty CA file is trust in every CA of the system",
        "kube/tls.py",
        "    if credentials.ca is not None and not credentials.ca.strip():\n",
        "    if False:\n",
        tests=("tests/kube/test_tls.py",),
    ),
    # --- claims and acts in the core --------------------------------------------------------------------------------
    Mutation(
        "two claims may have one GPU",
        "core/gpus/exclusion.py",
        "            _by_another_claim(state, entry, address, functions)\n            or _by_ledger",
        "            _by_ledger",
        tests=(EXCLUSION,),
    ),
    Mutation(
        "only prepared claims count as owners",
        "core/values/claim_states.py",
        "        _S.RESERVED,\n        _S.BINDING,\n        _S.WRITING,\n        _S.COMMITTING,\n        _S.PREPARED,\n        _S.VERIFYING,\n        _S.TAKEN_OVER,\n        _S.STOPPED,\n        _S.RELEASING,\n    }",  # noqa: E501
        "        _S.PREPARED,\n    }",
        tests=(EXCLUSION, PREPARE),
    ),
    Mutation(
        "a release touches a GPU that a pod or another driver's claim has",
        "core/gpus/driver.py",
        " and not has_another_owner(state, entry, g.address)\n",
        "\n",
        tests=(EXCLUSION,),
    ),
    Mutation(
        "a claim that was woken does not look who still has the group open",
        "core/gpus/exclusion.py",
        "            or _by_use(state, address)\n",
        "",
        tests=(EXCLUSION,),
    ),
    Mutation(
        "a GPU that was returned is offered as it was last seen",
        "core/gpus/driver.py",
        "    given = {g.address: Returned(claim, since) for g in gpus if g.address in changed}\n",
        "    given: dict[PciAddress, Returned] = {}\n",
        tests=(EXCLUSION,),
    ),
    Mutation(
        "the companions of IOMMU group 0 are forgotten",
        "core/gpus/exclusion.py",
        "    members = state.index.groups[group] if group is not None else (function,)\n",
        "    members = state.index.groups[group] if group else (function,)\n",
        tests=(EXCLUSION,),
    ),
    Mutation(
        "two GPUs of one IOMMU group are bound by two acts",
        "core/gpus/driver.py",
        "        return [str(gpu.address) for gpu in one_of_each_group(entry.gpus)]\n",
        "        return [str(gpu.address) for gpu in entry.gpus]\n",
        tests=(EXCLUSION,),
    ),
    Mutation(
        "admin access that kubelet lists is an owner",
        "core/devices/holdings.py",
        " if (c.name, a) not in admin and c.name not in ended]",
        " if c.name not in ended]",
        tests=(EXCLUSION,),
    ),
    Mutation(
        "an act is wanted before its intent is on disk",
        "core/claims/transitions.py",
        "            entry = replace(entry, intent=number, acts={},",
        "            entry = replace(entry, intent=claims.durable, acts={},",
        tests=("tests/core/claims/test_claims.py",),
    ),
    Mutation(
        "a prepare is answered before its commit is on disk",
        "core/claims/progress.py",
        "        case ClaimState.COMMITTING if claims.durable >= entry.intent:\n",
        "        case ClaimState.COMMITTING:\n",
        tests=(PREPARE,),
    ),
    Mutation(
        "the checkpoint calls a claim prepared that is being released",
        "core/claims/outputs.py",
        "        case ClaimState.RELEASING:\n            state = ClaimState.RELEASING\n",
        "        case ClaimState.RELEASING:\n            state = ClaimState.PREPARED\n",
        tests=(FORCED,),
    ),
    Mutation(
        "the first driver is noted anew after our own bind",
        "core/gpus/returns.py",
        "(f for a, f in functions.items() if a not in settled), acted)\n",
        "(f for a, f in functions.items() if a not in settled))\n",
        tests=("tests/core/claims/test_restart.py", PREPARE),
    ),
    Mutation(
        "a claim that is stopped is forgotten without a release",
        "core/values/claim_states.py",
        "    (_S.STOPPED, _E.UNPREPARE): (_S.RELEASING, _R.CHECKPOINT),\n",
        "    (_S.STOPPED, _E.UNPREPARE): (_S.TOMBSTONE, _R.FORGET),\n",
        tests=(PREPARE,),
    ),
    Mutation(
        "a release that was under way is not gone on with after a restart",
        "core/claims/progress.py",
        "        case ClaimState.RELEASING if _is_to_be_undone(driver, state, entry):\n",
        "        case ClaimState.RELEASING if entry.intent and _is_to_be_undone(driver, state, entry):\n",
        tests=("tests/core/claims/test_restart.py",),
    ),
    Mutation(
        "an unprepare is a success before the checkpoint is read",
        "core/claims/machine.py",
        "    if not driver.claims(state).loaded:\n",
        "    if False:\n",
        tests=("tests/core/claims/test_restart.py",),
    ),
    Mutation(
        "a checkpoint that was read while the predecessor wrote it counts",
        "core/claims/machine.py",
        "    if driver.claims(state).settings is None or event.load < load_of(state.daemon.role):\n",
        "    if driver.claims(state).settings is None:\n",
        tests=("tests/core/claims/test_restart.py",),
    ),
    Mutation(
        "a claim is collected after one answer",
        "core/claims/machine.py",
        "    if entry.missing == 0 or not _is_unlisted(driver, state, entry):\n",
        "    if not _is_unlisted(driver, state, entry):\n",
        tests=("tests/core/claims/test_collect.py",),
    ),
    Mutation(
        "kubelet's last list counts while kubelet is away",
        "core/claims/machine.py",
        "    is_its_list = ledger.problem is None and ledger.source",
        "    is_its_list = ledger.source",
        tests=("tests/core/claims/test_collect.py",),
    ),
    Mutation(
        "kubelet's file counts for the claims of pods, though it names none",
        "core/claims/machine.py",
        "ledger.source is LedgerSource.LIST\n",
        "not ledger.source.is_settling\n",
        tests=("tests/core/claims/test_collect.py",),
    ),
    Mutation(
        "a claim without a call that waits for it is prepared all the same",
        "core/claims/progress.py",
        "        case ClaimState.WAITING if not calls:\n",
        "        case ClaimState.WAITING if False:\n",
        tests=(PREPARE,),
    ),
    Mutation(
        "an act that is not wanted any more counts",
        "core/claims/machine.py",
        "    return next((e for e in claims.entries.values() if number in e.acts.values()), None)\n",
        "    return next((e for e in claims.entries.values() if e.acts), None)\n",
        tests=(PREPARE,),
    ),
    # --- SR-IOV -----------------------------------------------------------------------------------------------------
    Mutation(
        "a GPU whose virtual functions appear under its pod is refused to its container",
        "core/deviceplugin/calls.py",
        "        blockers = [b for b in blockers if b.cause not in OF_A_PART]\n",
        "        pass\n",
        tests=(VIRTUAL,),
    ),
    Mutation(
        "a physical function is inspected only when a uevent names it",
        "core/host/inspections.py",
        "frozenset((event.address, *_without_uevent(state, event.address)))",
        "frozenset((event.address,))",
        tests=(VIRTUAL,),
    ),
    Mutation(
        "a virtual function on its host's driver is offered to claims",
        "core/assessment/blockers.py",
        "    if (blocker := not_whole(function)) is not None:\n",
        "    if function.vfio_bound and (blocker := not_whole(function)) is not None:\n",
        tests=(VIRTUAL,),
    ),
    # --- GPUs of containers -----------------------------------------------------------------------------------------
    Mutation(
        "a GPU that NVIDIA's device plugin gave to a container is nobody's",
        "core/devices/holdings.py",
        " or gpu_uuid(n[1]) is not None",
        "",
        tests=(CONTAINER,),
    ),
    Mutation(
        "a claim keeps the GPU for which a container of NVIDIA's plugin waits",
        "core/gpus/exclusion.py",
        "        is_hosts = ends and given.is_by_hosts_driver\n",
        "        is_hosts = False\n",
        tests=(CONTAINER,),
    ),
    Mutation(
        "a GPU's UUID is forgotten when it moves to vfio",
        "core/host/inspections.py",
        "function = replace(function, gpu_uuid=known.gpu_uuid)",
        "pass",
        tests=(CONTAINER,),
    ),
    Mutation(
        "a kubelet that asks for a claim is not known to know its pods",
        "core/step.py",
        "ledger.called(state, at), event, at)",
        "state, event, at)",
        tests=(EXCLUSION,),
    ),
    # --- writes of slices -------------------------------------------------------------------------------------------
    Mutation(
        "a claim that kubelet still lists withdraws its GPU after it has ended",
        "core/devices/holdings.py",
        " not in admin and c.name not in ended]",
        " not in admin]",
        tests=(CHANGES,),
    ),
    Mutation(
        "the last use that was seen of a claim's GPU outlives the claim",
        "core/gpus/driver.py",
        "        if (last := seen.get(a)) is not None\n        and (\n",
        "        if (last := seen.get(a)) is not None\n        and last.inspection <= r.since and (\n",
        tests=(CHANGES,),
    ),
    Mutation(
        "each change of an offer is written at once",
        "actors/slice_publisher.py",
        "if self._written is not None and settled_at > now:",
        "if self._written is None and settled_at > now:",
        tests=(PUBLISHER,),
    ),
    # --- what is read of a GPU ----------------------------------------------------------------------------------------
    Mutation(
        "a GPU has the UUID of the one before it at its address",
        "host/nvidia.py",
        "            if known is not None and known[0] == inode:\n",
        "            if known is not None:\n",
        tests=(f"{NVIDIA}::test_another_gpu_at_the_address_is_read_anew",),
    ),
    Mutation(
        "a GPU's UUID is not read again after it was on another driver",
        "host/nvidia.py",
        "            self._known.pop(address, None)\n",
        "",
        tests=(f"{NVIDIA}::test_after_a_time_on_another_driver_it_is_read_anew",),
    ),
    Mutation(
        "a UUID that the driver does not know yet is one",
        "host/nvidia.py",
        "GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})",
        "GPU-[0-9a-f?]{8}(?:-[0-9a-f?]{4}){3}-[0-9a-f?]{12})",
        tests=(f"{NVIDIA}::test_what_the_driver_does_not_know_yet_is_asked_again",),
    ),
    Mutation(
        "a physical function with active virtual ones is a whole GPU",
        "core/assessment/blockers.py",
        "    if function.has_virtual_functions:\n",
        "    if False:\n",
        tests=(VIRTUAL,),
    ),
)
