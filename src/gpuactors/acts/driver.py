"""Brings a GPU and its companions to the drivers that they are to have: the only place that binds and unbinds.

The act says the goal. It begins with a look and goes on from where the functions are, so it can be done again after
any failure or death; nothing is rolled back. It refuses before its first write what would hang or harm: a function that
a process has open, active virtual functions, a driver that is not loaded, a function without a known original driver, a
group of which the host uses another function. Whatever was planned, it writes to functions of the GPU's slot only.

`driver_override` is only used between the unbind and the bind, and removed at the end of each act by the writing
process, whatever becomes of this one. What a write did is not believed but looked at.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, final

import trio
from msgspec import Struct
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.acts.blocking_runner import BlockingRunner
from gpuactors.acts.modprobe import Modprobe, ModprobeError
from gpuactors.acts.persistenced import Persistence, PersistenceError
from gpuactors.acts.writes import OpenWrites, Writes
from gpuactors.core.kinds.viability import not_viable, slot_of, with_companions
from gpuactors.core.values.claim import ActFault, BoundFunction, FitnessFinding, OriginalDriver, Target
from gpuactors.core.values.model import Holder, PciAddress, device_key
from gpuactors.core.values.quote import quoted_id
from gpuactors.host import modules
from gpuactors.host.group import Group, GroupFunction, GroupReader
from gpuactors.host.procfs import NodeId, ProcReader, Users
from gpuactors.host.root import DRIVERS_PROBE, PCI_DEVICES, PCI_DRIVERS, PROC, HostRoot
from gpuactors.ports.claims import ActError
from gpuactors.ports.errors import HostShortError
from gpuactors.process.logger import get_logger

BIND_SETTLE_S: Final = 2.0
"""The time from a write to its effect: the kernel is done when the write returns, and devtmpfs makes the node within
milliseconds. The rest is for a host directory in which another program plays the kernel."""

BIND_SETTLE_STEP_S: Final = 0.01
"""The interval between two looks at it: a few readlinks."""

HOLDERS_NAMED_MAX: Final = 4
"""Limit on the processes that a refusal to take a GPU names; the others are counted."""

FITNESS_CHECKS_SIDE_BY_SIDE: Final = 32
"""Limit on the GPUs that one check looks at side by side, each in a thread for some milliseconds: one whose sysfs hangs
holds up no other."""

LOOK_SETTLE_STEP_S: Final = 0.5
"""The same interval in a fitness check, for which nobody waits: 256 GPUs that their driver keeps started cost
little."""

_log = get_logger(__name__)

_NVIDIA: Final = "nvidia"
_PERSISTENCED_COMMAND: Final = "nvidia-persiste"
"""The part of its name that the kernel keeps (TASK_COMM_LEN)."""
_OF_THE_NODE: Final = frozenset(
    (
        "nv-hostengine",
        "dcgm-exporter",
        "dcgm_exporter",
        "nvidia-fabricma",
        "nvidia-imex",
        "nvidia-device-p",
        "gpu-feature-dis",
        "gpu-kubelet-plu",
        "compute-domain-",
    )
)
"""The names of NVIDIA's daemons that have GPUs open, as in /proc/PID/comm (15 characters): DCGM, the fabric manager,
the device plugin, GPU Feature Discovery, the DRA driver. Their pods do not end."""

_LOOKS: Final = round(BIND_SETTLE_S / BIND_SETTLE_STEP_S)

_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class _Move(Struct, frozen=True):
    """A function that is to change its driver."""

    function: GroupFunction
    driver: str | None
    """The driver to bind; None if it is to have none."""
    by_override: bool
    probe: bool = False
    """True if it had no driver: any driver may take it."""


class _Plan(Struct, frozen=True):
    """The steps of an act."""

    moves: tuple[_Move, ...] = ()
    leftovers: tuple[PciAddress, ...] = ()
    """The functions in whose `driver_override` a killed act may have left something."""

    @property
    def is_done(self) -> bool:
        return not (self.moves or self.leftovers)

    @property
    def written_to(self) -> frozenset[PciAddress]:
        return frozenset([*self.leftovers, *(move.function.address for move in self.moves)])


class _Task(Struct, frozen=True):
    """An act: the devices, and the drivers they are brought to."""

    devices: tuple[PciAddress, ...]
    """The GPU, and the others of the same claim and IOMMU group."""
    target: Target
    noted: Mapping[PciAddress, OriginalDriver]
    """The original drivers that are on disk."""

    @property
    def device(self) -> PciAddress:
        return self.devices[0]

    def functions(self, group: Group) -> list[GroupFunction]:
        """Return the functions that the act may touch: the GPUs, their companions, and others that an older version has
        bound."""
        own = {
            function.address
            for gpu in group.functions
            if gpu.address in self.devices
            for function in with_companions(gpu, group.functions)
        }
        return [f for f in group.functions if f.address in own or self._was_bound(f.address)]

    def may_write_to(self, group: Group) -> frozenset[PciAddress]:
        """Return the functions of the group that may be written to: the last guard, whatever was planned. A GPU's slot
        is its own, without virtual functions; a virtual function is alone."""
        slots = {
            slot_of(f.address) for f in group.functions if f.address in self.devices and not f.is_virtual
        }
        return frozenset(
            f.address
            for f in group.functions
            if f.address in self.devices
            or self._was_bound(f.address)
            or (slot_of(f.address) in slots and not f.is_virtual)
        )

    def _was_bound(self, address: PciAddress) -> bool:
        return address in self.noted and self.noted[address].was_bound


@final
class SysfsBinder:
    """Implements `ports.claims.DriverBinder`."""

    def __init__(
        self,
        root: HostRoot,
        open_writes: OpenWrites,
        persistence: Persistence,
        run_blocking: BlockingRunner,
        modprobe: Modprobe | None = None,
        *,
        deadline_s: float = limits.ACT_DEADLINE_S,
    ) -> None:
        """`modprobe`: None where no driver is loaded."""
        self._root = root
        self._open_writes = open_writes
        self._persistence = persistence
        self._run_blocking = run_blocking
        self._modprobe = modprobe
        self._deadline_s = deadline_s
        self._groups = GroupReader(root)
        self._let_go_of: set[PciAddress] = set()
        """The GPUs that nvidia-persistenced has closed for an act of gpuactors, and has not got back."""
        self._turns: dict[int, trio.Lock] = {}
        """The lock of each IOMMU group, for the acts of this daemon."""

    async def bring(
        self,
        device: PciAddress,
        target: Target,
        firsts: Collection[OriginalDriver],
        beside: Collection[PciAddress] = (),
    ) -> tuple[BoundFunction, ...]:
        noted = {first.address: first for first in firsts}
        with trio.move_on_after(self._deadline_s):
            try:
                return await self._bring(_Task((device, *beside), target, noted))
            except HostShortError as error:
                raise ActError(ActFault.REFUSED, f"nothing was done to {device}: {error}") from None
            except OSError as error:
                raise ActError(
                    ActFault.REFUSED,
                    f"{device} and its companions stay where they are, as "
                    f"{error.filename or 'a file of theirs'} could not be used ({error.strerror}): see the kernel's "
                    f"log for {device}; the next attempt continues",
                ) from None
        raise ActError(
            ActFault.HANGS,
            f"{device} and its companions were not on their drivers within {self._deadline_s:g} s, though no single "
            "write hung: see the kernel's log; the next attempt continues",
        )

    async def check_fitness(self, devices: Collection[PciAddress]) -> tuple[FitnessFinding, ...]:
        groups: dict[PciAddress, Group] = {}
        nodes: dict[NodeId, PciAddress] = {}
        users = Users({}, "")

        async def is_bindable(device: PciAddress) -> None:
            group = await self._refuse_bind(device)
            if group is not None:
                nodes.update(await self._run_blocking(partial(self._groups.nodes, group)))
                groups[device] = group

        async def find_users(_: PciAddress) -> None:
            nonlocal users
            users = await self._run_blocking(partial(ProcReader(self._root).users, nodes))

        async def is_unused(device: PciAddress) -> None:
            await self._refuse_used(device, groups[device], users)

        findings = await self._each(devices, is_bindable)
        if groups:
            (finding,) = (await self._each(list(groups)[:1], find_users)).values()
            if finding.reason:
                findings |= {device: replace(finding, device=device_key(device)) for device in groups}
            else:
                findings |= await self._each(groups, is_unused)
        return tuple(findings.values())

    async def _each(
        self, devices: Iterable[PciAddress], refuse: Callable[[PciAddress], Awaitable[None]]
    ) -> dict[PciAddress, FitnessFinding]:
        """Call `refuse` for each of these devices, side by side, and collect its errors."""
        findings = {device: FitnessFinding(device_key(device)) for device in devices}
        limiter = trio.CapacityLimiter(FITNESS_CHECKS_SIDE_BY_SIDE)

        async def one(device: PciAddress) -> None:
            fault, reason = ActFault.HANGS, f"it could not be checked within {self._deadline_s:g} s"
            async with limiter:
                with trio.move_on_after(self._deadline_s):
                    try:
                        await refuse(device)
                        return
                    except ActError as error:
                        fault, reason = error.fault, str(error)
                    except (HostShortError, OSError) as error:
                        fault, reason = ActFault.REFUSED, f"it could not be checked: {error}"
            findings[device] = FitnessFinding(device_key(device), fault, reason)

        async with trio.open_nursery() as nursery:
            for device in findings:
                nursery.start_soon(one, device)
        return findings

    async def _refuse_bind(self, device: PciAddress) -> Group | None:
        """Return the group of the device; None if there is nothing to bind in it. Raises `ActError` for what a later
        act on it would refuse, whoever uses it."""
        group = await self._look(device)
        functions = _not_on_vfio(device, group)
        for function in functions:
            await self._run_blocking(partial(self._vfio_driver, function))
            if function.has_virtual_functions:
                path = self._real(PCI_DEVICES, function.address, "sriov_numvfs")
                raise _virtual_functions(function.address, path)
        return group if functions else None

    async def _refuse_used(self, device: PciAddress, group: Group, users: Users) -> None:
        """Raise `ActError` if a later act on the device would refuse it for the users of its group."""
        gpus = [f.address for f in _not_on_vfio(device, group) if f.bound.driver == _NVIDIA]
        persisted = self._refuse_held(group, users, but_persistenced=bool(gpus))
        for address in gpus:
            if address not in persisted:
                await self._refuse_started(address, step_s=LOOK_SETTLE_STEP_S)

    async def _bring(self, task: _Task) -> tuple[BoundFunction, ...]:
        number = (await self._look(task.device)).iommu_group
        # Of two GPUs of one group, the second act waits for the first one.
        async with self._turns.setdefault(number, trio.Lock()):
            # Before a look may find everything done: an earlier daemon's write that hangs may still undo it.
            await self._run_blocking(partial(self._open_writes.refuse_under_way, number))
            group = await self._look(task.device)
            if (await self._plan(task, group)).is_done:
                return self._result(task, group)
            return await self._bring_in_turn(task, number)

    async def _bring_in_turn(self, task: _Task, number: int) -> tuple[BoundFunction, ...]:
        async with self._open_writes(number) as writes:
            # Only now nobody else writes: an earlier act may have come to its end meanwhile.
            group = await self._look(task.device)
            try:
                await self._act(writes, group, await self._plan(task, group), task.noted)
            except ActError as error:
                error.moved = await self._moved(task, group)
                raise
            return self._result(task, await self._look(task.device))

    async def _moved(self, task: _Task, before: Group) -> tuple[BoundFunction, ...]:
        """Return the functions that are on another driver than before; none if that cannot be read."""
        drivers = {f.address: f.bound.driver for f in before.functions}
        with suppress(ActError):
            now = self._result(task, await self._look(task.device))
            return tuple(b for b in now if b.address in drivers and b.driver != drivers[b.address])
        return ()

    def _result(self, task: _Task, group: Group) -> tuple[BoundFunction, ...]:
        """Return the bound functions: the GPU first, as its nodes are, then the others by address."""
        bound = [
            replace(function.bound, persistence=function.address in self._let_go_of)
            for function in task.functions(group)
        ]
        return tuple(sorted(bound, key=lambda b: (b.address != task.device, b.address)))

    # --- what is there and what is to do ------------------------------------------------------------------------------

    async def _look(self, device: PciAddress) -> Group:
        try:
            group = await self._run_blocking(lambda: self._groups.read(device))
        except OSError as error:  # it may well be there
            raise ActError(
                ActFault.REFUSED,
                f"{error.filename} cannot be read ({error.strerror}): check --host-root, and the kernel's log for "
                f"{device}; the next attempt continues",
            ) from None
        if group is None or all(function.address != device for function in group.functions):
            raise ActError(
                ActFault.GONE,
                f"{device} is not there, or has no IOMMU group: check it with lspci -s {device}, and that the IOMMU is "
                "on (firmware; with an Intel CPU also intel_iommu=on)",
            )
        return group

    async def _plan(self, task: _Task, group: Group) -> _Plan:
        """Plan the act. Raises `ActError` for what cannot be done."""
        functions = task.functions(group)
        match task.target:
            case Target.VFIO:
                _refuse_not_viable(task, group, functions)
                plan = await self._run_blocking(lambda: self._to_vfio(functions, task.noted))
            case Target.ORIGINAL_DRIVER:
                plan = await self._run_blocking(lambda: self._to_first(functions[::-1], task.noted))
        if others := plan.written_to - task.may_write_to(group):
            raise ActError(
                ActFault.NOT_VIABLE,
                f"{min(others)} is not in the slot of {task.device}, or one of them is a virtual function, so nothing "
                "was written: this is a bug in gpuactors, report it with the journal",
            )
        return plan

    def _to_vfio(self, functions: list[GroupFunction], noted: Mapping[PciAddress, OriginalDriver]) -> _Plan:
        moves: list[_Move] = []
        leftovers: list[PciAddress] = []
        for function in functions:
            first = noted.get(function.address)
            if function.bound.vfio:
                if first is not None and not first.vfio:
                    leftovers.append(function.address)
            elif first is None:
                raise ActError(
                    ActFault.UNKNOWN_FUNCTION,
                    f"{function.address} is in the IOMMU group of the GPU and was not there when the claim was "
                    "prepared: delete the pod, so that the claim is prepared anew",
                )
            else:
                moves.append(_Move(function, self._vfio_driver(function), by_override=True))
        return _Plan(tuple(moves), tuple(leftovers))

    def _to_first(self, functions: list[GroupFunction], noted: Mapping[PciAddress, OriginalDriver]) -> _Plan:
        moves: list[_Move] = []
        leftovers: list[PciAddress] = []
        for function in functions:
            first, bound = noted.get(function.address), function.bound
            if first is None or (first.presence and bound.presence not in (0, first.presence)):
                continue  # unknown, or plugged in since
            if first.vfio:  # pre-bound: by what it was found on, or by the operator's word
                if bound.driver is None:
                    moves.append(_Move(function, self._vfio_driver(function), by_override=True))
            elif (bound.vfio or bound.driver is None) and bound.driver != first.driver:
                driver = self._loaded(function, first.driver)
                moves.append(_Move(function, driver, by_override=False, probe=driver is None))
            elif not first.was_bound:
                # On its driver, or on one that somebody else has bound it to meanwhile.
                leftovers.append(function.address)
        return _Plan(tuple(moves), tuple(leftovers))

    def _vfio_driver(self, function: GroupFunction) -> str:
        """Return its vfio driver's name on the PCI bus, or the module's where it is loaded only before the bind. Raises
        `ActError`."""
        wanted = modules.vfio_driver(self._root, function.modalias)
        bus_name = modules.loaded(self._root, wanted)
        if bus_name is not None:
            return bus_name
        if self._modprobe is None:
            raise _not_loaded(function.address, wanted)
        if why := self._modprobe.why_not(wanted):
            raise _not_loaded(function.address, wanted, why)
        return wanted

    def _loaded(self, function: GroupFunction, driver: str | None) -> str | None:
        if driver is None:
            return None
        bus_name = modules.loaded(self._root, driver)
        if bus_name is None:
            raise _not_loaded(function.address, driver)
        return bus_name

    async def _with_driver(self, move: _Move) -> _Move:
        """Load the move's vfio driver, and return the move with its name. Raises `ActError`, `HostShortError`."""
        driver, modprobe = move.driver, self._modprobe
        if not move.by_override or driver is None or modprobe is None:
            return move
        if await self._run_blocking(lambda: modules.loaded(self._root, driver)) is not None:
            return move
        try:
            bus_name = await modprobe.load(driver)
        except ModprobeError as error:
            raise _not_loaded(move.function.address, driver, str(error)) from None
        _log.info("module.loaded", device=move.function.address, driver=bus_name)
        return replace(move, driver=bus_name)

    # --- may it be done -----------------------------------------------------------------------------------------------

    async def _refuse_virtual_functions(self, writes: Writes, function: GroupFunction) -> None:
        """Raise `ActError` if the function has virtual functions; `OSError` if it cannot be known."""
        path = self._real(PCI_DEVICES, function.address, "sriov_numvfs")
        count = ""
        with suppress(FileNotFoundError):
            count = (await writes.read(path)).strip()
        if function.has_virtual_functions or count not in ("", "0"):
            raise _virtual_functions(function.address, path)

    async def _refuse_users(self, group: Group, *, but_persistenced: bool) -> frozenset[PciAddress]:
        """Return the functions that nvidia-persistenced has open. Raises `ActError` if another process has a device of
        the group open, or any where it is not excepted."""
        users = await self._run_blocking(lambda: ProcReader(self._root).users(self._groups.nodes(group)))
        return self._refuse_held(group, users, but_persistenced=but_persistenced)

    def _refuse_held(self, group: Group, users: Users, *, but_persistenced: bool) -> frozenset[PciAddress]:
        """Do as `_refuse_users`, with the users of this group and others."""
        own = {function.address for function in group.functions}
        held = {h: addresses & own for h, addresses in users.by_process.items() if addresses & own}
        named = [h for h in held if not (but_persistenced and h.command == _PERSISTENCED_COMMAND)]
        if named:
            raise ActError(
                ActFault.IN_USE,
                f"{_named(named)} has a device of IOMMU group {group.iommu_group} open: its driver would wait for it "
                f"without limit. {self._end_of(named)}",
            )
        if users.unseen:
            raise ActError(
                ActFault.IN_USE,
                f"whether a process uses IOMMU group {group.iommu_group} cannot be known, as {users.unseen}: give the "
                f"daemon the host's processes in {self._root.real(PROC)}, CAP_DAC_READ_SEARCH and CAP_SYS_PTRACE",
            )
        return frozenset(address for opened in held.values() for address in opened)

    def _end_of(self, holders: list[Holder]) -> str:
        """Return how these processes let go of the GPU, as a sentence."""
        if any(holder.command == _PERSISTENCED_COMMAND for holder in holders):
            return (
                "It did not let go when it was asked, or has no socket at "
                f"{' or '.join(self._persistence.sockets)}: see its log, set --driver-root to the root of its driver, "
                "and mount that"
            )
        if any(holder.command in _OF_THE_NODE for holder in holders):
            return (
                "It runs as long as the node does: stop its service, or keep its DaemonSet off this node (of the GPU "
                "Operator: labels nvidia.com/gpu.deploy.<component>=false)"
            )
        return "End it, or wait until its pod has ended"

    async def _refuse_started(self, address: PciAddress, *, step_s: float = BIND_SETTLE_STEP_S) -> None:
        """Raise `ActError` if NVIDIA's driver keeps the GPU started although no process has it open: an unbind would
        never end (open-gpu-kernel-modules issues 1119, 1374). It stops it a moment after the last user has closed
        it."""
        for _ in range(round(BIND_SETTLE_S / step_s)):
            function = await self._function(address)
            if function.bound.driver != _NVIDIA or not function.interrupts:
                return
            await trio.sleep(step_s)
        raise ActError(
            ActFault.IN_USE,
            f"{address} is kept started by its driver (it has {function.interrupts} interrupts in msi_irqs), though no "
            "process has it open: an unbind might never end. Usually its legacy persistence mode is on: run "
            f"`nvidia-smi -i {address} -pm 0` on the host. Else nvidia_drm has it (modeset=1), or "
            "NVreg_GpuInitOnProbe=1 is set",
        )

    # --- doing it -----------------------------------------------------------------------------------------------------

    async def _act(
        self, writes: Writes, group: Group, plan: _Plan, noted: Mapping[PciAddress, OriginalDriver]
    ) -> None:
        for address in plan.leftovers:
            await self._clear_leftover(writes, address)
        if not plan.moves:
            return
        try:
            await self._may_move(writes, group, plan, noted)
            moves = [await self._with_driver(move) for move in plan.moves]
            for move in moves:
                await self._move(writes, group, move, noted)
        finally:
            with trio.CancelScope(shield=True):
                await self._persisted_again(plan, noted)

    async def _may_move(
        self, writes: Writes, group: Group, plan: _Plan, noted: Mapping[PciAddress, OriginalDriver]
    ) -> None:
        """Raise `ActError` if a function may not change its driver now, and as `_refuse_virtual_functions`."""
        try:
            await self._refuse_moves(writes, group, plan)
        except (ActError, OSError):
            # A daemon may have been killed with its writing process, and have left what the move would replace.
            for first in (noted[move.function.address] for move in plan.moves):
                if not (first.vfio or first.was_bound):
                    with suppress(ActError):
                        await self._clear_leftover(writes, first.address)
            raise

    async def _refuse_moves(self, writes: Writes, group: Group, plan: _Plan) -> None:
        """Raises `ActError`."""
        for move in plan.moves:
            await self._refuse_virtual_functions(writes, move.function)
        gpus = [m.function.address for m in plan.moves if m.function.bound.driver == _NVIDIA]
        persisted = await self._refuse_users(group, but_persistenced=bool(gpus))
        await self._let_go(group, [address for address in gpus if address in persisted])
        for address in gpus:
            await self._refuse_started(address)

    async def _let_go(self, group: Group, gpus: list[PciAddress]) -> None:
        """Have nvidia-persistenced let go of these GPUs. Raises `ActError` if somebody still uses one."""
        for address in gpus:
            self._let_go_of.add(address)
            await self._persist(address, on=False)
        if gpus:
            await self._refuse_users(group, but_persistenced=False)

    async def _persisted_again(self, plan: _Plan, noted: Mapping[PciAddress, OriginalDriver]) -> None:
        """Give a GPU back to nvidia-persistenced that has released it for gpuactors, if it is on NVIDIA's driver now,
        and nothing else."""
        for address in (move.function.address for move in plan.moves):
            first = noted.get(address)
            if address not in self._let_go_of and not (first is not None and first.persistence):
                continue
            with suppress(ActError):
                if (await self._function(address)).bound.driver == _NVIDIA:
                    self._let_go_of.discard(address)
                    await self._persist(address, on=True)

    async def _clear_leftover(self, writes: Writes, address: PciAddress) -> None:
        """Clear a `driver_override` that a killed act may have left. Only one that names a vfio driver can be
        gpuactors' own."""
        path = self._real(PCI_DEVICES, address, "driver_override")
        try:
            if "vfio" in await writes.read(path):
                await writes.write(path, "\n")
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._refused(address, path, error) from None

    async def _move(
        self, writes: Writes, group: Group, move: _Move, noted: Mapping[PciAddress, OriginalDriver]
    ) -> None:
        address, before = move.function.address, move.function.bound.driver
        override = self._real(PCI_DEVICES, address, "driver_override")
        foreign_override = await self._override(writes, address, override)
        if not move.by_override and "vfio" in foreign_override and noted[address].was_bound:
            return  # driverctl, vfio-manager or an administrator has it on vfio now
        # One that names a vfio driver is what a killed act of ours has left; another one is somebody else's.
        foreign_override = "" if "vfio" in foreign_override else foreign_override
        if move.by_override:
            await writes.at_the_end(override, f"{foreign_override}\n")
            await self._write(writes, address, override, f"{move.driver}\n")
        elif not foreign_override:
            await self._write(writes, address, override, "\n")
        if before is not None:
            if not move.function.bound.vfio:  # somebody may have opened it since
                await self._refuse_users(group, but_persistenced=False)
            if before == _NVIDIA:  # or switched its persistence mode on
                await self._refuse_started(address)
            path = self._real(PCI_DRIVERS, before, "unbind")
            await self._change(writes, address, path, lambda now: now.driver != before)
        if move.probe or (foreign_override and not move.by_override):
            await self._change(writes, address, self._root.real(DRIVERS_PROBE), lambda now: True)
        elif move.driver is not None:
            path = self._real(PCI_DRIVERS, move.driver, "bind")
            # A driver may have none (suppress_bind_attrs).
            if not await self._run_blocking(lambda: os.path.exists(path)):
                path = self._root.real(DRIVERS_PROBE)
            await self._change(writes, address, path, lambda now: now.driver == move.driver)
            if move.by_override:
                await self._await_node(address)

    async def _override(self, writes: Writes, address: PciAddress, path: str) -> str:
        """Read the function's `driver_override`; empty if it has none. Raises `ActError`."""
        try:
            current = (await writes.read(path)).strip()
        except OSError as error:
            raise self._refused(address, path, error) from None
        return "" if current == "(null)" else current

    async def _change(
        self, writes: Writes, address: PciAddress, path: str, done: Callable[[BoundFunction], bool]
    ) -> None:
        """Write the address to `path` and check the effect: an error does not count if somebody else has done it
        before. Raises `ActError`."""
        refused: OSError | None = None
        try:
            await writes.write(path, f"{address}\n")
        except OSError as error:
            refused = error
        for _ in range(_LOOKS if refused is None else 1):
            now = (await self._function(address)).bound
            if done(now):
                return
            await trio.sleep(BIND_SETTLE_STEP_S)
        raise self._refused(address, path, refused, now)

    async def _await_node(self, address: PciAddress) -> None:
        """Wait for the node by which a virtual machine opens it. Its absence is no failure of the bind: the assessment
        reports it."""
        for _ in range(_LOOKS):
            group = await self._look(address)
            if group.has_node or any(f.bound.cdev for f in group.functions if f.address == address):
                return
            await trio.sleep(BIND_SETTLE_STEP_S)

    async def _function(self, address: PciAddress) -> GroupFunction:
        group = await self._look(address)
        function = next((f for f in group.functions if f.address == address), None)
        if function is None:
            raise ActError(ActFault.GONE, f"{address} has vanished: check it with lspci -s {address}")
        return function

    async def _write(self, writes: Writes, address: PciAddress, path: str, text: str) -> None:
        try:
            await writes.write(path, text)
        except OSError as error:
            raise self._refused(address, path, error) from None

    def _refused(
        self, address: PciAddress, path: str, error: OSError | None, now: BoundFunction | None = None
    ) -> ActError:
        what = f"was refused ({error.strerror})" if error is not None else "returned and changed nothing"
        where = ""
        if now is not None:
            where = (
                f"; it is on {quoted_id(now.driver)}" if now.driver is not None else "; it has no driver now"
            )
        return ActError(
            ActFault.REFUSED,
            f"the write of {address} to {path} {what}{where}: {_remedy(address, error, now)}",
        )

    async def _persist(self, address: PciAddress, *, on: bool) -> None:
        """Ask nvidia-persistenced. Its refusal is no failure of the act: what it leaves open is found; what it does not
        take back costs its next user time."""
        try:
            if await self._persistence.set(address, on=on):
                _log.info("persistence.set", device=address, on=on)
        except PersistenceError as error:
            _log.warning("persistence.failed", device=address, on=on, reason=str(error))

    def _real(self, *parts: str) -> str:
        return self._root.real("/".join(parts))


def _remedy(address: PciAddress, error: OSError | None, now: BoundFunction | None) -> str:
    """Return the remedy for a write that was refused, or changed nothing."""
    if error is not None and error.errno in _FORBIDDEN:
        return "mount the host's /sys writable and run the daemon as root (deploy/overlays/dra)"
    again = f"see the kernel's log for {address}; the next attempt continues"
    if error is not None and error.errno == errno.EBUSY and now is not None and now.driver is None:
        # iommu_device_use_default_domain: a group is the host's or user space's, as a whole.
        return (
            f"usually because a process has a device of IOMMU group {now.iommu_group} open, maybe only in a socket "
            f"message that is not received yet, which no list of open files shows; {again}"
        )
    return again


def _not_loaded(address: PciAddress, driver: str, why: str = "") -> ActError:
    """Return the error of a driver that is not loaded. `why`: why it could not be loaded, and what to do."""
    name = quoted_id(driver)
    remedy = why or f"run `modprobe {name}` on the host, and have it loaded at boot (/etc/modules-load.d)"
    return ActError(ActFault.NO_DRIVER, f"{address} is to be bound to {name}, which is not loaded: {remedy}")


def _refuse_not_viable(task: _Task, group: Group, to_bind: Iterable[GroupFunction]) -> None:
    """Raise `ActError` if the host uses another member of the group: it may have come since the claim was allowed."""
    gpu = next(function for function in group.functions if function.address == task.device)
    reason = not_viable(gpu, group, group.functions, {function.address for function in to_bind})
    if reason is not None:
        raise ActError(ActFault.NOT_VIABLE, f"{task.device}: {reason.message}. Nothing was written")


def _not_on_vfio(device: PciAddress, group: Group) -> list[GroupFunction]:
    functions = _Task((device,), Target.VFIO, {}).functions(group)
    return [function for function in functions if not function.bound.vfio]


def _virtual_functions(address: PciAddress, path: str) -> ActError:
    return ActError(
        ActFault.VIRTUAL_FUNCTIONS,
        f"{address} has active virtual functions, which would go with its driver: write 0 to {path} when nobody uses "
        "them",
    )


def _named(holders: list[Holder]) -> str:
    shown = ", ".join(str(holder) for holder in holders[:HOLDERS_NAMED_MAX])
    more = len(holders) - HOLDERS_NAMED_MAX
    return f"{shown} and {more} more" if more > 0 else shown
