"""Which IOMMU groups are in use, without touching them: the adaptor behind the polls.

Reads `enable` and `power/runtime_status` of each function, which never block (not even on kernel 6.1 while an unbind
waits for its holder). With `proc` it reads the holders by `procfs.py`. Opening a group makes it busy for any process
that opens it at that instant, so it is done only with `open`, and only where the target allows it. Must not decide what
the evidence means.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, final

import trio
from msgspec import Struct
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.concurrency.patience import Patience
from gpuactors.core.reports.snapshot import PollTarget
from gpuactors.core.values.model import GroupUse, Holder, PciAddress
from gpuactors.host.best_effort import names_in
from gpuactors.host.faults import fault, gone, raise_if_short
from gpuactors.host.procfs import ProcPass, ProcReader
from gpuactors.host.root import GROUP_NODES, IOMMU_GROUPS, PCI_DEVICES, HostRoot, group_node
from gpuactors.host.sysfs import read_attribute
from gpuactors.host.threads import start_thread
from gpuactors.ports.errors import HostError
from gpuactors.process.logger import get_logger

if TYPE_CHECKING:
    from gpuactors.ports.node import Observation

PROC_SCAN_REST: Final = 50
"""The rest after a pass over all processes (`--holders proc`), as a multiple of its duration (2 % of one core at most);
PROC_SCAN_REST_MAX_S if that is shorter. It ends early if something changed or a call waits. In between only the known
holders are read, so a release is seen at once."""

PROC_SCAN_REST_MAX_S: Final = 4.0
"""The longest rest between two such passes, two polls, so that there is a bound on any node: a process that opens a
group without its device, which sysfs does not show, is seen within POLL_S, this and two passes. Measured: 6 µs a
descriptor; up to 13,000 of them keep to the 2 %, and a node with 60,000 (0.37 s a pass) spends 8 % of one core."""

OPEN_WITHIN_S: Final = 0.5
"""How long after it was allowed a group may be opened as a probe (`--holders open`), in seconds. It may be allocated
meanwhile, and a container takes longer to start."""

Holders: TypeAlias = Literal["passive", "proc", "open"]
"""The values of the setting `holders`."""

OpenNode: TypeAlias = Callable[[str], None]
"""Opens a device node for reading and writing and closes it at once. Raises `OSError`."""

_log = get_logger(__name__)

_LACKS: Final[Mapping[Holders, str]] = {
    "proc": "--holders proc needs the host's processes, CAP_DAC_READ_SEARCH and CAP_SYS_PTRACE (in a pod: "
    "deploy/overlays/holders-proc)",
    "open": "--holders open needs permission to open them (in a pod: privileged)",
}
"""The needs of each method beyond sysfs."""

_PROC: Final = -1
"""The number for the pass over /proc, in the place of a group's."""


def open_and_close(path: str) -> None:
    """Implement `OpenNode`: 13 µs, in which no other process can open the group (drivers/vfio/group.c,
    vfio_group_fops_open)."""
    os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))


class _Passive(Struct, frozen=True):
    """The facts in sysfs about one group."""

    target: PollTarget
    enabled: Mapping[PciAddress, int]
    active: frozenset[PciAddress]
    unseen: str
    """See `GroupUse.unseen`."""

    @property
    def seems_used(self) -> bool:
        return any(self.enabled.values())

    @property
    def to_open(self) -> bool:
        """With `open`: only opening it can show more, and no process is disturbed."""
        return self.target.may_open and not self.seems_used


class _FullPass(Struct, frozen=True):
    """The last pass over all processes, with what sysfs showed then."""

    holders: Mapping[int, tuple[Holder, ...]]
    enabled: Mapping[PciAddress, int]
    groups: frozenset[int]
    took_s: float
    problem: str
    """Why processes could not be read; empty if all could."""

    def restricted_to(self, groups: Set[int], functions: Set[PciAddress]) -> _FullPass:
        """Return the results for these groups only."""
        return replace(
            self,
            holders={g: held for g, held in self.holders.items() if g in groups},
            enabled={a: count for a, count in self.enabled.items() if a in functions},
            groups=self.groups & groups,
        )

    def without(self, groups: Set[int], functions: Set[PciAddress]) -> _FullPass:
        """Return the results for all groups but these."""
        return self.restricted_to(self.groups - groups, self.enabled.keys() - functions)

    def merged_with(self, others: _FullPass) -> _FullPass:
        """Return these results together with those of the other groups."""
        return replace(
            self,
            holders={**others.holders, **self.holders},
            enabled={**others.enabled, **self.enabled},
            groups=others.groups | self.groups,
        )


@final
class _Observation:
    """One observation. Implements `ports.node.Observation`. Written by its thread, read by the task that waits for it
    and may give it up. The thread appends or assigns each finding whole, so that a reader sees all of it or nothing."""

    def __init__(
        self,
        root: HostRoot,
        holders: Holders,
        open_node: OpenNode,
        targets: tuple[PollTarget, ...],
        *,
        whole: bool,
        skip: frozenset[int],
        last_pass: _FullPass | None,
        rested: bool,
        open_until: float,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_end = on_end
        self._root = root
        self._holders = holders
        self._open_node = open_node
        self.targets = targets
        self.whole = whole
        """True if there are no other groups."""
        self._skip = skip
        self._rested = rested
        self._open_until = open_until
        self.full_pass = last_pass
        """The last pass over all processes, with this observation's results; for other groups the earlier ones."""
        self.at: int | None = None
        """The group that is being read, or `_PROC`."""
        self.given_up = False
        """True once no task waits for it any more."""
        self.begun = False
        self.over = trio.Event()
        """Set when its thread is done with it."""
        self.failure: Exception | None = None
        self.passed_all = False
        """True if all processes were read for every group. Only such a pass is followed by a rest: any other one renews
        nothing for the other groups."""
        self._passive: list[_Passive] = []
        self._proc_pass: ProcPass | None = None
        self._refused: dict[int, bool | None] = {}
        """The result of opening; no entry where it was not tried."""
        self.forbidden = ""
        """Why a group may not be opened."""

    @property
    def is_over(self) -> bool:
        return self.begun and self.over.is_set()

    def run(self) -> None:
        """Implement `ports.node.Observation.run`: reads everything, the most reliable evidence first. Ends early when
        it was given up. A shortage, or a bug, is its `failure`."""
        self.begun = True
        try:
            self._run()
        except Exception as exc:
            self.failure = exc
        finally:
            self.at = None

    def ended(self) -> None:
        self._on_end()
        self.over.set()

    def _run(self) -> None:
        for target in self.targets:
            if not self._begin(target.group):
                continue
            self._passive.append(_passive(self._root, target))
        if self._holders == "proc" and self._begin(_PROC):
            self._proc_pass = self._find()
        if self._holders == "open":
            for passive in self._passive:
                if passive.to_open and self._begin(passive.target.group):
                    self._try_open(passive.target)

    def _begin(self, part: int) -> bool:
        if self.given_up or part in self._skip:
            return False
        self.at = part
        return True

    # --- the holders ----------------------------------------------------------------------------------------

    def _find(self) -> ProcPass:
        """Return the holders: of the last pass if nothing has changed since, else of a new one."""
        proc = ProcReader(self._root)
        enabled = {a: count for passive in self._passive for a, count in passive.enabled.items()}
        groups = frozenset(target.group for target in self.targets)
        functions = frozenset(a for target in self.targets for a in target.functions)
        last_pass, others = self.full_pass, None
        if last_pass is not None and not self.whole:
            others = last_pass.without(groups, functions)
            last_pass = last_pass.restricted_to(groups, functions)
        urgent = any(target.urgent for target in self.targets)
        if (
            last_pass is not None
            and not (self._rested or urgent)
            and (last_pass.enabled, last_pass.groups) == (enabled, groups)
        ):
            pids = {holder.pid for held in last_pass.holders.values() for holder in held}
            result = proc.find(self.targets, only=pids, before=last_pass.holders, go_on=self._go_on)
            if result.holders == last_pass.holders:
                return result
        began = time.perf_counter()
        before = last_pass.holders if last_pass is not None else {}
        result = proc.find(self.targets, before=before, go_on=self._go_on)
        if not self.given_up:
            took_s = time.perf_counter() - began
            full_pass = _FullPass(result.holders, enabled, groups, took_s, result.problem)
            self.full_pass = full_pass if others is None else full_pass.merged_with(others)
            self.passed_all = self.whole
        return result

    def _go_on(self) -> bool:
        return not self.given_up

    def _try_open(self, target: PollTarget) -> None:
        group = target.group
        if time.monotonic() > self._open_until or not self._is_still_of(target):
            return
        try:
            self._open_node(self._root.real(group_node(group)))
        except OSError as error:
            raise_if_short(error, self._root.real(group_node(group)))
            # Any other refusal (no such node, no permission) is no evidence of use.
            if isinstance(error, PermissionError):
                self.forbidden = f"{self._root.real(GROUP_NODES)}/* may not be opened ({error.strerror})"
            self._refused[group] = True if error.errno == errno.EBUSY else None
        else:
            self._refused[group] = False

    def _is_still_of(self, target: PollTarget) -> bool:
        """Return whether the group still has the target's functions: a card that is plugged in gets the lowest free
        number, and a pod may have that one."""
        members = names_in(self._root.real(f"{IOMMU_GROUPS}/{target.group}/devices"))
        return frozenset(target.functions) <= frozenset(members)

    @property
    def problem(self) -> str | None:
        """Why less is seen than was requested; empty if nothing is wrong, None if this observation does not show it."""
        if self._holders == "proc" and self.full_pass is not None:
            return self.full_pass.problem
        if self._holders == "open" and self._refused:
            return self.forbidden
        return None

    # --- what is known now ----------------------------------------------------------------------------------

    def uses(self) -> tuple[GroupUse, ...]:
        """Return the findings so far."""
        holders, passives = self._proc_pass, tuple(self._passive)
        seen = {passive.target.group for passive in passives}
        hanging = tuple(
            GroupUse(t.group, {}, frozenset(), None, None, self._hangs(t))
            for t in self.targets
            if t.group not in seen and (t.group in self._skip or t.group == self.at)
        )
        return (
            tuple(use for passive in passives if (use := self._use(passive, holders)) is not None) + hanging
        )

    def _hangs(self, target: PollTarget) -> str:
        directory = self._root.real(PCI_DEVICES)
        return fault(
            ", ".join(target.functions), f"{directory}/*/enable or power/runtime_status there", "hangs"
        )

    def _use(self, passive: _Passive, proc: ProcPass | None) -> GroupUse | None:
        """Return the use of one group; None if nothing is known."""
        group = passive.target.group
        holders = None if proc is None else proc.holders.get(group, () if proc.exhaustive else None)
        if passive.unseen:
            refused = self._refused.get(group)
            return GroupUse(group, passive.enabled, passive.active, holders, refused, passive.unseen)
        # A group without functions is a mediated device's: sysfs shows nothing of its use.
        if passive.target.functions and not passive.enabled and not holders:
            return None
        # Sysfs shows nothing of a group of which only the node is open, so it proves nothing where the requested check
        # failed.
        if self._holders == "proc" and proc is None and not passive.seems_used and self._was_held(group):
            return None
        if self._holders == "open" and passive.to_open and group not in self._refused:
            return None
        return GroupUse(group, passive.enabled, passive.active, holders, self._refused.get(group))

    def _was_held(self, group: int) -> bool:
        return self.full_pass is not None and group in self.full_pass.holders


@final
class SysfsUse:
    """`ports.node.UseReader` on a real host: one thread per observation, for all groups together.

    A read that hangs is given up at the deadline; its thread cannot be ended and stays until the kernel answers. As
    long as it does, later observations leave out the one group (or the pass over /proc) at which it hangs, so that
    there is never more than one thread per group, and the others go on being observed.
    """

    def __init__(
        self,
        root: HostRoot,
        holders: Holders,
        *,
        open_node: OpenNode = open_and_close,
        deadline_s: float = limits.POLL_DEADLINE_S,
    ) -> None:
        self._root = root
        self._holders = holders
        self._open_node = open_node
        self._deadline_s = deadline_s
        self._hanging: list[_Observation] = []
        self._full_pass: _FullPass | None = None
        self._rested_at = 0.0
        self._problem = ""
        """The last logged reason for what is missing."""
        self._short = ""

    async def observe(self, targets: tuple[PollTarget, ...], *, whole: bool) -> tuple[GroupUse, ...]:
        observation = self._begin(targets, whole=whole)
        try:
            start_thread(observation.run, lambda _: observation.ended(), name="poll")
        except HostError as exc:
            observation.failure = exc
            observation.ended()
        return await self._result(observation)

    def begin(self, targets: tuple[PollTarget, ...]) -> _Observation:
        return self._begin(targets, whole=False)

    async def result(self, observation: Observation) -> tuple[GroupUse, ...]:
        assert isinstance(observation, _Observation)
        if not observation.begun:
            observation.given_up = True  # whoever begins with it now reads nothing
            self._forget(observation)
            return await self.observe(observation.targets, whole=observation.whole)
        return await self._result(observation)

    def _begin(self, targets: tuple[PollTarget, ...], *, whole: bool) -> _Observation:
        observation = _Observation(
            self._root,
            self._holders,
            self._open_node,
            targets,
            whole=whole,
            skip=frozenset(hanging.at for hanging in self._hanging if hanging.at is not None),
            last_pass=self._full_pass,
            rested=trio.current_time() >= self._rested_at,
            open_until=time.monotonic() + OPEN_WITHIN_S,
            on_end=lambda: self._forget(observation),
        )
        self._hanging.append(observation)
        return observation

    def _forget(self, observation: _Observation) -> None:
        if observation in self._hanging:
            self._hanging.remove(observation)

    async def _result(self, observation: _Observation) -> tuple[GroupUse, ...]:
        """Wait for its end or its deadline, and return its findings."""
        try:
            await Patience(self._deadline_s).ends(observation.over)
        finally:
            observation.given_up = True
        if observation.failure is not None and not isinstance(observation.failure, HostError):
            raise observation.failure
        # After a shortage the poll saw less, or nothing; the core requests another one soon.
        self._log_shortage("" if observation.failure is None else str(observation.failure))
        if observation.full_pass is not None and observation.full_pass is not self._full_pass:
            self._full_pass = observation.full_pass
        if observation.passed_all and observation.full_pass is not None:
            rest_s = min(PROC_SCAN_REST * observation.full_pass.took_s, PROC_SCAN_REST_MAX_S)
            self._rested_at = trio.current_time() + rest_s
        self._log_problem(observation.problem)
        return observation.uses()

    def _log_shortage(self, shortage: str) -> None:
        """Log once which shortage hides the use of the groups."""
        if shortage and not self._short:
            _log.warning("host.short", reason=f"the processes that use each GPU are unknown now: {shortage}")
        self._short = shortage

    def _log_problem(self, problem: str | None) -> None:
        """Log once what is missing, and when it is available again."""
        if problem is None or problem == self._problem:
            return
        self._problem = problem
        if problem:
            reason = f"{problem}: {_LACKS[self._holders]}; until then only sysfs is used"
            _log.warning("holders.unavailable", reason=reason)
        else:
            _log.info("holders.available")


# --- reading ----------------------------------------------------------------------------------------------------


def _passive(root: HostRoot, target: PollTarget) -> _Passive:
    enabled: dict[PciAddress, int] = {}
    active: set[PciAddress] = set()
    unseen = ""
    for address in target.functions:
        directory = root.real(f"{PCI_DEVICES}/{address}")
        try:
            enabled[address], is_active = _function(directory)
        except (OSError, ValueError) as error:
            if not gone(directory):
                unseen = unseen or _unseen(address, f"{directory}/enable", error)
            continue
        if is_active:
            active.add(address)
    return _Passive(target, enabled, frozenset(active), unseen)


def _unseen(address: PciAddress, path: str, error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return fault(address, path, f"cannot be read ({error.strerror})")
    return fault(address, path, "reads something else than the number of times that the function is enabled")


def _function(directory: str) -> tuple[int, bool]:
    """Return the enable count and whether the function is active, as they were at one moment.

    A device is resumed before it is enabled, and suspended after it is disabled (drivers/vfio/pci/vfio_pci_core.c,
    vfio_pci_core_enable and _disable). If one closes between the two reads, they show enabled and suspended, as a count
    that an operator wrote does for ever. So that is read once more: between two reads of `suspended` no descriptor was
    open, as a resume and a suspend take milliseconds. Raises `OSError`, `ValueError`.
    """
    count = int(read_attribute(f"{directory}/enable"))
    active = _is_active(directory)
    if count and not active:
        count = int(read_attribute(f"{directory}/enable"))
        active = _is_active(directory)
    return count, active


def _is_active(directory: str) -> bool:
    """Return False only for `suspended`, which shows that no descriptor is open: a kernel without CONFIG_PM has no such
    file, and `resuming`, `suspending` and `error` can be either."""
    try:
        return read_attribute(f"{directory}/power/runtime_status").strip() != b"suspended"
    except OSError:
        return True
