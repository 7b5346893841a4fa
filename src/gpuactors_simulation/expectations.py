"""The conditions after a step of a scenario: the step's own expectations, and those after every step.

Each expectation is a value that is shown as a sentence and compared with kubelet's view. Must not wait and must not
act: `world.py` compares again after every change until all are met or the time is up.
"""

from __future__ import annotations

from msgspec import Struct

from gpuactors.core.values.cause import Cause
from gpuactors.replay import counts
from gpuactors_simulation.kubelet.device_manager import KubeletView, LedgerEntry, Phase
from gpuactors_simulation.situation import Situation

# --- what a step expects ---------------------------------------------------------------------------------------


class Counts(Struct, frozen=True):
    """One resource has these counts."""

    resource: str
    capacity: int
    allocatable: int
    allocated: int

    def __str__(self) -> str:
        return f"{self.resource}: {counts.Counts(self.capacity, self.allocatable, self.allocated)}"

    def unmet(self, situation: Situation) -> str | None:
        actual = situation.view.resources.get(self.resource)
        if actual == counts.Counts(self.capacity, self.allocatable, self.allocated):
            return None
        if actual is None:
            return f"kubelet knows no resource {self.resource}"
        return f"{self.resource} has {actual}"


class Unknown(Struct, frozen=True):
    """Kubelet has no devices of a resource and never had."""

    resource: str

    def __str__(self) -> str:
        return f"{self.resource}: not registered with kubelet"

    def unmet(self, situation: Situation) -> str | None:
        if self.resource not in situation.view.connected:
            return None
        return f"{self.resource} is registered"


class Runs(Struct, frozen=True):
    """A pod runs, on exactly these devices if they are named."""

    pod: str
    on: frozenset[str] | None = None

    def __str__(self) -> str:
        return f"{self.pod} runs" + (f" on {_listed(self.on)}" if self.on is not None else "")

    def unmet(self, situation: Situation) -> str | None:
        pod = situation.view.pods.get(self.pod)
        if pod is None:
            return f"there is no pod {self.pod}"
        if pod.phase is not Phase.RUNNING:
            return f"{self.pod} is {pod.phase}" + (f": {pod.message}" if pod.message else "")
        devices = devices_of(situation.view, self.pod)
        if self.on is not None and devices != self.on:
            return f"{self.pod} runs on {_listed(devices)}"
        return None


class Waits(Struct, frozen=True):
    """A pod is Pending because the scheduler sees no room."""

    pod: str

    def __str__(self) -> str:
        return f"{self.pod} waits for a free GPU"

    def unmet(self, situation: Situation) -> str | None:
        pod = situation.view.pods.get(self.pod)
        if pod is None:
            return f"there is no pod {self.pod}"
        if pod.phase is not Phase.PENDING or "Insufficient" not in pod.message:
            return f"{self.pod} is {pod.phase}" + (f": {pod.message}" if pod.message else "")
        return None


class HeldUp(Struct, frozen=True):
    """A pod has its devices, and its container waits to start: PreStartContainer was called and has not returned."""

    pod: str

    def __str__(self) -> str:
        return f"{self.pod} has its GPU, and its container waits to start"

    def unmet(self, situation: Situation) -> str | None:
        pod = situation.view.pods.get(self.pod)
        if pod is None:
            return f"there is no pod {self.pod}"
        if pod.phase is not Phase.STARTING or pod.message:
            return f"{self.pod} is {pod.phase}" + (f": {pod.message}" if pod.message else "")
        return None if devices_of(situation.view, self.pod) else f"{self.pod} has no device"


class Refused(Struct, frozen=True):
    """A pod failed its admission, and its message has all these parts."""

    pod: str
    naming: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.pod} is refused, and its message names: {', '.join(self.naming)}"

    def unmet(self, situation: Situation) -> str | None:
        pod = situation.view.pods.get(self.pod)
        if pod is None:
            return f"there is no pod {self.pod}"
        if pod.phase is not Phase.FAILED or not all(part in pod.message for part in self.naming):
            return f"{self.pod} is {pod.phase}" + (f": {pod.message}" if pod.message else "")
        return None


class Unhealthy(Struct, frozen=True):
    """A device is listed Unhealthy for that cause, and the daemon's reason has all these parts."""

    device: str
    cause: Cause
    naming: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.device} is Unhealthy, because of: {', '.join(self.naming)}"

    def unmet(self, situation: Situation) -> str | None:
        return _not_unhealthy(situation, self.device, self.cause, self.naming)


class HeldByExternal(Struct, frozen=True):
    """Every GPU that an external process has open is Unhealthy, and there is one; the reason names the process."""

    pid: int
    command: str

    def __str__(self) -> str:
        return f"what {self.command} (pid {self.pid}) holds is Unhealthy, and the reason names it"

    def unmet(self, situation: Situation) -> str | None:
        held = sorted(address for address, pid in situation.holders.items() if pid == self.pid)
        if not held:
            return f"process {self.pid} holds nothing"
        naming = (str(self.pid), self.command)
        problems = (_not_unhealthy(situation, a, Cause.HELD_BY_OTHER, naming) for a in held)
        return "; ".join(problem for problem in problems if problem) or None


class Orphaned(Struct, frozen=True):
    """The GPUs that a pod had at the step's beginning are Unhealthy: the pod is gone, and its process still holds them.
    The reason names both."""

    pod: str

    def __str__(self) -> str:
        return f"the GPU of {self.pod} is Unhealthy, and the reason names the pod and its process"

    def unmet(self, situation: Situation) -> str | None:
        devices_before = sorted(devices_of(situation.before, self.pod))
        if not devices_before:
            return f"{self.pod} had nothing"
        problems = []
        for device in devices_before:
            pid = situation.holders.get(device)
            if pid is None:
                problems.append(f"no process holds {device}")
            elif problem := _not_unhealthy(situation, device, Cause.ORPHANED, (f"/{self.pod}", str(pid))):
                problems.append(problem)
        return "; ".join(problems) or None


class NobodyRefused(Struct, frozen=True):
    """No pod ever failed its admission: its message would be UnexpectedAdmissionError, which is final for the pod."""

    def __str__(self) -> str:
        return "no pod was refused"

    def unmet(self, situation: Situation) -> str | None:
        refused = [pod for pod in situation.view.pods.values() if pod.phase is Phase.FAILED]
        return "; ".join(f"{pod.name} is {pod.phase}: {pod.message}" for pod in refused) or None


def _not_unhealthy(situation: Situation, device: str, cause: Cause, naming: tuple[str, ...]) -> str | None:
    """The contrary of: the device is Unhealthy for that cause, and its reason, a sentence for people, has all these
    parts."""
    health = next((row.health for row in situation.view.devices if row.id == device), "not listed")
    if health != "Unhealthy":
        return f"{device} is {health}"
    reason = situation.reasons.get(device, "")
    is_so = situation.causes.get(device) is cause and all(name in reason for name in naming)
    return None if is_so else f"the reason is: {reason or 'none'}"


# --- what holds after every step -------------------------------------------------------------------------------


class Sound(Struct, frozen=True):
    """The conditions after every step."""

    def __str__(self) -> str:
        return "kubelet's view is sound"

    def unmet(self, situation: Situation) -> str | None:
        checks = (_faults, _negative, _overfull, _twice, _swapped, _disturbed, _untrue)
        return "; ".join(problem for check in checks if (problem := check(situation)) is not None) or None


def _faults(situation: Situation) -> str | None:
    return "; ".join(situation.faults) or None


def _negative(situation: Situation) -> str | None:
    negative = [f"{r}: free is {f.free}" for r, f in situation.view.resources.items() if f.free < 0]
    return "; ".join(negative) or None


def _overfull(situation: Situation) -> str | None:
    over = [r for r, f in situation.view.resources.items() if f.allocated > f.capacity]
    return f"more is allocated than there is of {', '.join(over)}" if over else None


def _twice(situation: Situation) -> str | None:
    """One owner per device, by the variables of the containers."""
    owners: dict[str, list[str]] = {}
    for (pod, _), entry in situation.view.holdings.items():
        for address in addresses_of(entry):
            owners.setdefault(address, []).append(pod)
    twice = [f"{a} was handed out to {_listed(pods)}" for a, pods in owners.items() if len(pods) > 1]
    return "; ".join(twice) or None


def _swapped(situation: Situation) -> str | None:
    """Return the pods whose variables name other devices than kubelet's ledger, as a sentence."""
    swapped = [
        f"kubelet gave {pod} {_listed(entry.devices)}, but its container opens {_listed(addresses_of(entry))}"
        for (pod, _), entry in situation.view.holdings.items()
        if sorted(addresses_of(entry)) != sorted(entry.devices)
    ]
    return "; ".join(swapped) or None


def _disturbed(situation: Situation) -> str | None:
    """Return the pods that ran at the step's beginning and no longer run on the same devices, as a sentence."""
    problems = []
    for name, pod_before in situation.before.pods.items():
        pod = situation.view.pods.get(name)
        if pod_before.phase is not Phase.RUNNING or pod is None:
            continue
        if pod.phase is not Phase.RUNNING or devices_of(situation.before, name) != devices_of(
            situation.view, name
        ):
            problems.append(f"{name} was running and is disturbed")
    return "; ".join(problems) or None


def _untrue(situation: Situation) -> str | None:
    """Kubelet's Healthy devices are the GPUs that a VM could open, no more and no fewer."""
    if not situation.view.running:
        return None
    healthy = {row.id for row in situation.view.devices if row.health == "Healthy"}
    wrong = [f"{d} is offered, but no VM could open it" for d in sorted(healthy - situation.truth)]
    wrong += [f"{d} could be used, but is not offered" for d in sorted(situation.truth - healthy)]
    return "; ".join(wrong) or None


# --- reading the view ------------------------------------------------------------------------------------------


def devices_of(view: KubeletView, pod: str) -> frozenset[str]:
    """Return the devices of all resources that kubelet's ledger has for a pod."""
    return frozenset(d for (name, _), entry in view.holdings.items() if name == pod for d in entry.devices)


def addresses_of(entry: LedgerEntry) -> list[str]:
    """Return the PCI addresses in the variables of a container: KubeVirt opens these and nothing else."""
    values = [v for name, v in entry.envs.items() if name.startswith("PCI_RESOURCE_")]
    return [address for value in values for address in value.split(",")]


def _listed(names: frozenset[str] | tuple[str, ...] | list[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
