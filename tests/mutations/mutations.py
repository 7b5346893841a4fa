"""Bugs to plant, each a change of a few words in one file: an await moved, a conflation dropped, a check removed.

Each is a bug that somebody could make, in the words of what goes wrong. Of those in this file no test is there for most
by name: an order of events has to find it. `before` occurs exactly once in its file; where
the program has changed, the runner says so and the mutation is to be written anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Mutation:
    """One bug."""

    name: str
    file: str
    """Below `src/gpuactors/`."""
    before: str
    after: str
    test: str = ""
    """The test that finds it, as pytest names it; empty where an order of events has to."""


MUTATIONS: Final = (
    # --- ledger and use ------------------------------------------------------------------------------------------
    Mutation(
        "an allocated GPU that is held is Unhealthy",
        "core/assessment/assess.py",
        "        if device.has_backing:\n            return Health.HEALTHY, holding.reason",
        "        if device.has_backing:\n"
        "            busy = inputs.use is not None and inputs.use.in_use\n"
        "            return (Health.UNHEALTHY if busy else Health.HEALTHY), holding.reason",
    ),
    Mutation(
        "no tombstone: a GPU that is gone under its pod leaves the list",
        "core/deviceplugin/device_lists.py",
        "        if lost := of_pods - of_resource.keys():\n",
        "        if lost := set[DeviceId]():\n",
    ),
    Mutation(
        "a GPU whose unbind waits leaves the list while somebody has it open",
        "core/deviceplugin/entries.py",
        "    if device.has_backing or is_unbinding(device, use_of(state, device)):\n",
        "    if device.has_backing:\n",
    ),
    Mutation(
        "a GPU that has lost its driver leaves the list before it is known whether it is open",
        "core/deviceplugin/entries.py",
        "    return _is_leaving(state, device) and any(entry.key == device.key for entry in listed)\n",
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
        "    orphans = {**_still_orphans(after), **new_orphans}\n",
        "    orphans: dict[DeviceKey, Orphan] = {}\n",
    ),
    Mutation(
        "a group's other members are not asked for an owner",
        "core/assessment/holding.py",
        "    for owned, owner in sorted(inputs.owners, key=lambda pair: pair[0] != key):\n",
        "    for owned, owner in (pair for pair in inputs.owners if pair[0] == key):\n",
    ),
    Mutation(
        "a GPU that an external process holds is handed out",
        "core/deviceplugin/calls.py",
        "        if held is None or _is_awaited(state, address, held):\n",
        "        if held is None or not isinstance(held.holder, Owner):\n",
    ),
    Mutation(
        "the gate is open: a start waits for nobody",
        "core/deviceplugin/calls.py",
        "            return None if conflicts or _held(state, call) else Ready()\n",
        "            return None if conflicts else Ready()\n",
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
        "    unknown = [*index.unresolved, *filterfalse(before.__contains__, pending)]\n",
        "    unknown = [*state.kubelet.ledger.entries, *pending]\n",
    ),
    # --- inspections ----------------------------------------------------------------------------------------
    Mutation(
        "an older inspection overwrites what a later one found",
        "core/host/inspections.py",
        "            if seen_before is not None and seen_before.inspection > number:\n"
        "                continue\n            now",
        "            now",
    ),
    Mutation(
        "a hint that comes during an inspection is forgotten",
        "core/host/inspections.py",
        "    return ask_inspections(inspections, again) if again else inspections\n",
        "    return inspections\n",
    ),
    Mutation(
        "what came back incomplete is not inspected again",
        "core/host/inspections.py",
        "            if failed or not is_complete:  # with growing waits, without end\n",
        "            if failed and not is_complete and function is None:\n",
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
        '            after = _rescanned(state, uevents="", scan_begun=event.scan_begun)\n',
        '            after = replace(state, host=replace(state.host, uevents=""))\n',
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
        "        retry_at=at + _backoff(REGISTER_BACKOFF_S, failures),\n",
        "        retry_at=None if plugin.streams else at + _backoff(REGISTER_BACKOFF_S, failures),\n",
    ),
    Mutation(
        "an order to register is passed over",
        "actors/plugin.py",
        "                if current.register > self._registered:\n",
        "                if current.register > self._registered + 1:\n",
    ),
    Mutation(
        "a socket that kubelet has swept away is taken for there",
        "actors/plugin.py",
        "                    if current.renew or not endpoint.still_there():\n",
        "                    if current.renew:\n",
    ),
    Mutation(
        "calls in flight are cut off when a stream is ended",
        "actors/plugin.py",
        "                    await endpoint.drain(limits.DRAIN_S)\n",
        "                    await endpoint.drain(0.0)\n",
    ),
    Mutation(
        "any owner of a device is taken for the pod of the call",
        "core/deviceplugin/calls.py",
        "            return entry.to is None or has_kept(ledger.books, name) is not True\n",
        "            return True\n",
    ),
    Mutation(
        "kubelet is asked for List while an Allocate is in flight",
        "core/host/asking.py",
        "    if any(call.kind is CallKind.ALLOCATE for call in state.calls.waiting.values()):\n        return False\n",
        "",
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
        "actors/sysfs_inspector.py",
        "    return (GroupsObserved if wanted.whole else SomeGroupsObserved)(wanted.poll, uses)\n",
        "    await trio.sleep(3)\n    return GroupsObserved(wanted.poll - 1, uses)\n",
    ),
    Mutation(
        "the watcher ends at the first overflow",
        "actors/udev_watcher.py",
        "            await inbox.send(UeventsLost(str(exc)))\n            continue\n",
        "            await inbox.send(UeventsLost(str(exc)))\n            await trio.sleep_forever()\n",
    ),
)
