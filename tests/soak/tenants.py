"""The pods of a soak: what each asks for, and what became of it. Pure: `judged` reads a pod's status."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tests.node.cluster import Object

RUNS, WAITS, STARTS, REFUSED, GONE, FAILED = "runs", "waits", "starts", "refused", "gone", "failed"

KUBELETS: Final = ("UnexpectedAdmissionError", "OutOf", "NodeAffinity")
"""Beginnings of reasons by which kubelet refuses a pod before it starts anything of it."""

_NAMES: Final = re.compile(
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d"
    r"|(plugin|claim|crossing|channel)-\d+(-[\w-]+)?|\b\d+\b"
)
_MOST_WORDS: Final = 160


@dataclass(slots=True)
class Tenant:
    """A pod that the soak has made."""

    name: str
    kind: str
    asked: int
    """GPUs."""
    made_at: float
    state: str = STARTS
    said: str = ""
    """Why it waits or was refused."""
    ran_after_s: float | None = None
    refused_by: str = ""
    """Kubelet's words; empty unless it has refused the pod."""
    is_over: bool = False
    """The soak has deleted it."""

    def look(self, pod: Object | None, now: float) -> None:
        """Its state by what the API server has of it."""
        self.state, self.said = judged(pod)
        if self.state == RUNS and self.ran_after_s is None:
            self.ran_after_s = now - self.made_at
        if self.state == REFUSED:
            self.refused_by = self.said


def judged(pod: Object | None) -> tuple[str, str]:
    """The state of a pod, and why."""
    if pod is None:
        return GONE, ""
    status = pod.get("status", {})
    phase, reason = status.get("phase", ""), status.get("reason", "")
    if phase == "Running":
        return RUNS, ""
    if phase == "Failed":
        words = status.get("message", "")
        return (REFUSED if reason.startswith(KUBELETS) else FAILED), f"{reason}: {words}"
    if phase == "Succeeded":
        return FAILED, "its container has ended"
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return WAITS, condition.get("message", "")
    return STARTS, ""


def without_names(words: str) -> str:
    """A reason without what is of one pod, so that it can be counted."""
    return _NAMES.sub("…", " ".join(words.split()))[:_MOST_WORDS]
