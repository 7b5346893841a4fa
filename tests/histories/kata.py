"""A node whose daemons answer by CDI names (`--preset kata`), and whether they keep to the files of these.

The CDI directory is in memory. Daemons, administrators and another program write there, and the virtual machines of
pods are started by what Kata finds there (`tests/support/kata.py`). Checked here: a daemon has written what it says
that it has; it names no device twice; it takes no name from a pod; it offers and gives away only what the files have,
with the nodes of the card. Must not know how the daemon decides which files there are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final, final

import trio
import trio.lowlevel

from gpuactors.acts.spec_files import SpecFiles
from gpuactors.concurrency.latest import Latest
from gpuactors.core.events.deviceplugin import AllocateAsked, SpecsWritten
from gpuactors.core.state import NodeState
from gpuactors.core.values.cdi import CdiSpecs
from gpuactors.core.values.device_spec import DeviceSpecs
from gpuactors.core.values.effects import Granted, Reply
from gpuactors.core.values.model import Health, PciAddress, ResourceName, Role, Token
from gpuactors.host.cdi import spec_of
from gpuactors.ports.node import CdiReader, SpecDirectory, Step
from gpuactors_simulation.memory.acts import inline
from tests.histories.other_driver import OtherDriver
from tests.memory.disk import FakeDisk
from tests.support.kata import LETTERS, SandboxError, devices_of, devices_of_file, is_word, nodes_of

KATA: Final = 1 << 41
"""The bit of a history's seed by which its daemons answer by CDI names."""

CDI_DIR: Final = "/var/run/cdi"
ANOTHERS: Final = f"{CDI_DIR}/another.json"
"""The file of another program."""

SLOW_S: Final = 0.5
"""How long a slow write of the files takes, before and after it is done."""

KNOWN_AFTER_S: Final = 0.2
"""A read of kubelet's ledger, and with it of the CDI directory, that began so long before a call counts for it."""

GIVEN_UNSAFE: Final = "a CDI name was given that does not lead to its card"

Names = Mapping[str, tuple[str, ...]]
"""The device nodes of each CDI name."""


@dataclass(slots=True)
class _Asked:
    """An Allocate that is not answered yet."""

    call: AllocateAsked
    groups: dict[str, int | None]
    """The IOMMU group of each card that has stayed in it since the call came."""
    anothers: Set[str]
    """The names that another program's file had when it came, and for long enough."""


@final
class Kata:
    """The CDI directory of one node, and who writes there. Each wrong act of a daemon is in `problems`, as a check's
    name and a text."""

    def __init__(self) -> None:
        self.group_of: Callable[[str], int | None] = lambda _card: None
        """The IOMMU group of a card that is on vfio-pci; None if it is not."""
        self.disk = FakeDisk()
        self.disk.put("/var/run/.made", b"")
        self.slow_writes = 0
        """So many writes are still to take long."""
        self.problems: list[tuple[str, str]] = []
        self.others_of: Callable[[str], Set[str]] = lambda _card: frozenset()
        """The other cards that are there."""
        self.state_of: Callable[[str], NodeState | None] = lambda _daemon: None
        """The state of a daemon that runs."""
        self.held: Callable[[], Set[tuple[str, str]]] = frozenset
        """The devices of pods by kubelet's ledger, by resource and ID."""
        self.has_misled = False
        """A virtual machine was started by what no daemon has written: it may have another one's card open."""
        self._touched = Latest(0)
        self._said: dict[str, list[Names]] = {}
        """The names that each daemon has found written, since it has posted that last."""
        self._wrote: dict[str, set[str]] = {}
        """The names that each daemon has ever written."""
        self._posted: dict[str, DeviceSpecs] = {}
        """The files that each daemon knows to be there."""
        self._written: Names = {}
        """The names of the files right after a daemon has written last: what somebody has done since is not its
        fault."""
        self._asked: dict[tuple[str, Token], _Asked] = {}
        self._anothers_since: dict[str, float] = {}
        """The names in the file of another program, and since when."""

    # --- what daemons and runtimes reach --------------------------------------------------------------------

    def directory_of(self, daemon: str) -> SpecDirectory:
        """The directory as a daemon writes it."""
        return _Directory(self, daemon)

    def reader(self, other_driver: OtherDriver) -> CdiReader:
        """The directory as a daemon reads it, with the files of another driver."""
        return _Reader(self, other_driver)

    def runtime(self, names: Sequence[str]) -> Sequence[str]:
        """The device nodes that Kata finds. Raises `LookupError`."""
        if not names:
            return ()
        try:
            found = nodes_of(devices_of(self.files()), names)
        except SandboxError as error:
            raise LookupError(str(error)) from None
        self.has_misled |= any(nodes != self._written.get(name) for name, nodes in found.items())
        return [node for nodes in found.values() for node in nodes]

    async def touches(self) -> AsyncGenerator[frozenset[ResourceName] | None, None]:
        """Implement `SpecDirectory.touches`."""
        async for _ in self._touched.subscribe():
            yield None

    # --- what happens to it ---------------------------------------------------------------------------------

    def touch(self) -> None:
        """Somebody has written or removed a file."""
        self._touched.set(self._touched.value + 1)
        self.look()

    def power_cut(self) -> None:
        """The machine stops: the directory is empty after it."""
        self.end_faults()
        self.disk.power_cut()
        self.disk.put("/var/run/.made", b"")
        self._written = {}
        self._wrote.clear()
        self.touch()

    def end_faults(self) -> None:
        """The directory can be written, and quickly."""
        self.disk.full, self.disk.keeps, self.slow_writes = False, "", 0

    # --- what is there --------------------------------------------------------------------------------------

    def files(self) -> dict[str, bytes]:
        """The files of the directory by their name."""
        paths = ((PurePosixPath(path), content) for path, content in self.disk.files.items())
        return {path.name: content for path, content in paths if str(path.parent) == CDI_DIR}

    def ours(self) -> list[str]:
        """The names of the daemons' files."""
        return sorted(name for name in self.files() if name.startswith("gpuactors-"))

    def is_anothers(self, name: str) -> bool:
        """The file of another program has this CDI name, so that no runtime finds it."""
        return not self.is_spoiled() and name in self._names_of_another()

    def can_offer(self, resource: str, card: str) -> bool:
        """A runtime can find the card by its CDI name, once it is written."""
        name = f"{resource}={card}"
        return _is_kind(name) and not self.is_anothers(name)

    def is_spoiled(self) -> bool:
        """The file of another program is no CDI file: Kata makes no sandbox."""
        try:
            self._names_of_another()
        except SandboxError:
            return True
        return False

    def _names_of_another(self) -> Names:
        content = self.disk.files.get(ANOTHERS)
        return {} if content is None else devices_of_file(ANOTHERS, content)

    def wrong(self, given: Set[str]) -> list[str]:
        """What is wrong with the daemons' files at rest. `given`: the names of the devices that pods have or can
        get, as far as a virtual machine could open them."""
        found: dict[str, tuple[str, ...]] = {}
        for name in self.ours():
            try:
                found |= devices_of_file(name, self.files()[name])
            except SandboxError as error:
                return [f"a CDI file is damaged: {error}"]
        lacking = (name for name in given - found.keys() if _is_kind(name))
        unmet = [f"{name}, which a pod has or can get, is in no CDI file" for name in sorted(lacking)]
        for name, nodes in found.items():
            card = name.partition("=")[2]
            group, others = self.group_of(card), {_node(self.group_of(a)) for a in self.others_of(card)}
            if group is not None and nodes != _nodes(group):
                unmet.append(f"{name} leads to {nodes}, its card is in group {group}")
            if group is None and others.intersection(nodes):
                unmet.append(f"{name} leads to {nodes}, which is another card's, and its own is not there")
        return unmet

    # --- the writes of daemons ------------------------------------------------------------------------------

    def wrote(
        self,
        daemon: str,
        specs: DeviceSpecs,
        unwritten: Mapping[ResourceName, str],
        before: Names,
        state: NodeState | None,
    ) -> None:
        """A daemon has written these files, but for those that it could not write. `before`: the names in the files
        before that; `state`: the daemon's when it began."""
        files, names = self.files(), dict[str, tuple[str, ...]]()
        times = Counter[str]()
        for file in self.ours():
            resource = file.removeprefix("gpuactors-").removesuffix(".json").replace("_", "/", 1)
            if resource in unwritten:
                continue
            if resource not in specs:
                self._add("a CDI file is left", f"{daemon} has left {file}, which has no device")
                continue
            try:
                found = devices_of_file(file, files[file])
            except SandboxError as error:
                self._add("what was written is no CDI file", str(error))
                continue
            times.update(found.keys())
            names |= found
        self._check_written(daemon, specs, unwritten, names)
        if doubles := [name for name, number in times.items() if number > 1]:
            self._add("one CDI name is in two files", f"{daemon} has written {doubles} twice")
        self._check_kept(daemon, before, names, unwritten, state)
        self._wrote.setdefault(daemon, set()).update(names)
        self._written = names

    def found(self, daemon: str, specs: DeviceSpecs) -> None:
        """A daemon that does not serve yet has found these files."""
        said, there = _named(specs), _names(self)
        self._said.setdefault(daemon, []).append(said)
        if unlike := [name for name, nodes in said.items() if there.get(name) != nodes]:
            self._add(
                "CDI files are said to be there that are not", f"{daemon} says {unlike}, there is {there}"
            )

    def _check_written(
        self, daemon: str, specs: DeviceSpecs, unwritten: Mapping[ResourceName, str], names: Names
    ) -> None:
        said = _named({resource: spec for resource, spec in specs.items() if resource not in unwritten})
        self._said.setdefault(daemon, []).append(said)
        if said != names:
            self._add(
                "CDI files are said to be written that are not", f"{daemon} says {said}, there is {names}"
            )

    def _check_posted(self, daemon: str, specs: DeviceSpecs) -> None:
        """What a daemon posts is what one of its writes has found, the last one or one that it has not posted."""
        said, posted = self._said.pop(daemon, []), _named(specs)
        self._said[daemon] = said[-1:]
        if posted not in said:
            self._add("CDI files are said to be written that are not", f"{daemon} posts {posted}, of {said}")

    def _check_kept(
        self,
        daemon: str,
        before: Names,
        names: Names,
        unwritten: Mapping[ResourceName, str],
        state: NodeState | None,
    ) -> None:
        """No name of a pod's device goes, as far as the daemon has read of the pod, while its card is there; nor while
        the card is gone, this daemon has known it, and nobody else has its node."""
        if state is None:
            return
        for resource, device in sorted(self.held() & state.kubelet.ledger.entries.keys()):
            name = f"{resource}={device}"
            if name not in before or name in names or resource in unwritten:
                continue
            group = self.group_of(device)
            others = (f for address, f in state.host.functions.items() if address != device)
            is_free = not any(_node(f.iommu_group) in before[name] for f in others)
            is_known_gone = group is None and name in self._wrote.get(daemon, ())
            if (group is not None and _node(group) in before[name]) or (is_known_gone and is_free):
                self._add("a pod's CDI name is gone", f"{daemon} has removed {name}, which a pod has")

    # --- the steps of daemons -------------------------------------------------------------------------------

    def stepped(self, daemon: str, step: Step) -> None:
        """A daemon's core took an event."""
        self.look()
        self._check_offered(daemon, step.before)
        match step.event:
            case SpecsWritten() as event:
                self._posted[daemon] = event.specs
                self._check_posted(daemon, event.specs)
            case AllocateAsked() as call:
                ids = [i for request in call.requests for i in request]
                long_ago = trio.current_time() - KNOWN_AFTER_S
                known = {name for name, since in self._anothers_since.items() if since < long_ago}
                self._asked[daemon, call.token] = _Asked(call, {i: self.group_of(i) for i in ids}, known)
            case _:
                pass
        for reply in (effect for effect in step.effects if isinstance(effect, Reply)):
            asked = self._asked.pop((daemon, reply.token), None)
            if asked is not None and isinstance(reply.answer, Granted):
                self._check_granted(asked, reply.answer)

    def look(self) -> None:
        """Something has happened on the node."""
        for asked in self._asked.values():
            for card, group in list(asked.groups.items()):
                if self.group_of(card) != group:
                    del asked.groups[card]
        now = trio.current_time()
        theirs = {} if self.is_spoiled() else self._names_of_another()
        self._anothers_since = {name: self._anothers_since.get(name, now) for name in theirs}
        for asked in self._asked.values():
            asked.anothers &= theirs.keys()

    def _check_offered(self, daemon: str, state: NodeState) -> None:
        """What is Healthy and nobody's is in the files that the daemon knows to be there, with its card's nodes. What a
        process has open, as far as the daemon knows, may be a pod's that it has not read of."""
        if state.daemon.role is not Role.SERVING or state.daemon.stopping:
            return
        posted, given = self._posted.get(daemon, {}), {device for _, device in self.held()}
        for resource, devices in state.published.device_lists.items():
            for device in devices:
                function = state.host.functions.get(PciAddress(device.key))
                is_given = device.key in state.index.owners or device.key in given
                if device.health is not Health.HEALTHY or is_given or function is None:
                    continue
                group, nodes = function.iommu_group, posted.get(resource, {}).get(device.id)
                use = state.host.polls.groups.get(group) if group is not None else None
                if group is None or not (nodes == _nodes(group) or (use is not None and use.in_use)):
                    text = f"{resource}={device.id} of group {group} is offered, its file has {nodes}"
                    self._add("a device is Healthy without its CDI file", text)

    def _check_granted(self, asked: _Asked, granted: Granted) -> None:
        call = asked.call
        for ids, grant in zip(call.requests, granted.containers, strict=True):
            wanted = tuple(f"{call.resource}={device}" for device in sorted(ids))
            if grant.cdi_ids != wanted or grant.envs or any("vfio" in node for node in grant.nodes):
                self._add(GIVEN_UNSAFE, f"{wanted} were asked for, {grant} was answered")
            for device, name in zip(sorted(ids), wanted, strict=True):
                if name in asked.anothers:
                    self._add(GIVEN_UNSAFE, f"{name} is in {ANOTHERS} as well")
                if device not in asked.groups:
                    continue
                group, nodes = asked.groups[device], self._written.get(name)
                if group is None or nodes != _nodes(group):
                    self._add(
                        GIVEN_UNSAFE, f"{name} was answered, whose file has {nodes}; its group is {group}"
                    )

    def _add(self, check: str, text: str) -> None:
        self.problems.append((check, text))


@final
class _Directory:
    """Implements `ports.node.SpecDirectory` for one daemon."""

    def __init__(self, kata: Kata, daemon: str) -> None:
        self._kata = kata
        self._daemon = daemon
        self._files = SpecFiles(kata.disk, CDI_DIR, inline)

    async def write(self, specs: DeviceSpecs) -> Mapping[ResourceName, str]:
        kata = self._kata
        state = kata.state_of(self._daemon)
        is_slow, kata.slow_writes = kata.slow_writes > 0, max(0, kata.slow_writes - 1)
        await trio.sleep(SLOW_S if is_slow else 0)
        before, old = kata.files(), _names(kata)
        unwritten = self._files.write_now(specs)
        kata.wrote(self._daemon, specs, unwritten, old, state)
        if kata.files() != before:
            kata.touch()
        await trio.sleep(SLOW_S if is_slow else 0)
        return unwritten

    async def find(self, specs: DeviceSpecs) -> Set[ResourceName]:
        await trio.lowlevel.checkpoint()
        found = self._files.find_now(specs)
        self._kata.found(self._daemon, {resource: specs[resource] for resource in found})
        return found

    async def touches(self) -> AsyncGenerator[frozenset[ResourceName] | None, None]:
        async for touched in self._kata.touches():
            yield touched


@final
class _Reader:
    """Implements `ports.node.CdiReader`."""

    def __init__(self, kata: Kata, other_driver: OtherDriver) -> None:
        self._kata = kata
        self._other_driver = other_driver

    async def read(self) -> CdiSpecs:
        others = await self._other_driver.read()
        read = (
            spec_of(f"{CDI_DIR}/{name}", content)
            for name, content in self._kata.files().items()
            if name[0] != "."
        )
        specs = (*others.specs, *(spec for spec in read if spec is not None))
        return CdiSpecs(tuple(sorted(specs, key=lambda spec: spec.path)))


def _names(kata: Kata) -> Names:
    """The names in each of the daemons' files that is one."""

    def found() -> Iterator[Names]:
        for name in kata.ours():
            try:
                yield devices_of_file(name, kata.files()[name])
            except SandboxError:
                continue

    return {name: nodes for names in found() for name, nodes in names.items()}


def _named(specs: DeviceSpecs) -> Names:
    """The nodes of each name in these files."""
    return {f"{resource}={i}": nodes for resource, spec in specs.items() for i, nodes in spec.items()}


def _is_kind(name: str) -> bool:
    """CDI takes the kind of this name. All vendors here are such that it does."""
    return is_word(name.partition("=")[0].partition("/")[2], LETTERS, "_-.")


def _nodes(group: int) -> tuple[str, ...]:
    """The device nodes by which a virtual machine opens a group."""
    return "/dev/vfio/vfio", _node(group)


def _node(group: int | None) -> str:
    return f"/dev/vfio/{group}"


def another_file(names: Sequence[str], group: int) -> bytes:
    """The file of another program with these names, which all lead to this group."""
    kind = names[0].partition("=")[0]
    edits = {"deviceNodes": [{"path": node, "permissions": "rw"} for node in _nodes(group)]}
    devices = [{"name": name.partition("=")[2], "containerEdits": edits} for name in names]
    return json.dumps({"cdiVersion": "0.6.0", "kind": kind, "devices": devices}).encode()
