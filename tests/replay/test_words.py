"""Events in words."""

from __future__ import annotations

import pytest

from gpuactors.core.events.kubelet import LedgerRead
from gpuactors.core.values.model import DeviceId, LedgerEntry, LedgerFile, Pod, RunningKubelet
from gpuactors.replay.words import event_words
from tests.core.builders import H100

KUBELET = RunningKubelet("1:2:3", 0.0)
A, B = (LedgerEntry(H100, DeviceId(device), Pod("default", "vm", "")) for device in "ab")


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (
            LedgerRead(7, KUBELET, (A, B), (), file=LedgerFile()),
            "PodResources: 2 devices given to pods; 0 in its file",
        ),
        (
            LedgerRead(7, KUBELET, (A,), (), file=LedgerFile((B,))),
            "PodResources: 1 device given to pods; 1 in its file",
        ),
        (
            LedgerRead(7, KUBELET, (), (), file=LedgerFile((B,)), passive=True),
            "without PodResources: 1 in its file",
        ),
        (LedgerRead(7, KUBELET, (), ()), "PodResources: 0 devices given to pods; its file could not be read"),
        (
            LedgerRead(7, None, (), (), file=LedgerFile((A,))),
            "kubelet_internal_checkpoint: 1 device given to pods",
        ),
    ],
)
def test_of_a_read_of_the_ledger_it_is_shown_what_list_and_what_the_file_said(
    event: LedgerRead, words: str
) -> None:
    """Which of it counts depends on the reads before."""
    assert event_words(event) == f"read 7 of kubelet's ledger: {words}"
