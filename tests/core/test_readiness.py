"""What a daemon lacks until it is ready: each item by itself, and none where nothing is missing."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.deviceplugin.registration import KUBELET_LIST_TAKEN_S, REGISTER_BACKOFF_S
from gpuactors.core.events.claims import SlicesPublished
from gpuactors.core.events.daemon import ShutdownRequested, Ticked
from gpuactors.core.events.deviceplugin import StreamEnded
from gpuactors.core.events.kubelet import KubeletAppeared, KubeletGone
from gpuactors.core.reports.readiness import unmet_prerequisites
from gpuactors.core.step import initial_state
from gpuactors.core.values.claim import ClaimsOf
from gpuactors.core.values.model import Role, Settings
from gpuactors.core.values.slices import Publication, ServerKeeps
from tests.core.builders import H100, SETTINGS, Core, gpu
from tests.core.gpus.claim_core import ClaimCore

OURS = ["0000:01:00.0", "0000:02:00.0"]


def started(settings: Settings = SETTINGS) -> Core:
    """Two GPUs, just registered."""
    core = Core(gpu("01:00.0"), gpu("02:00.0"), settings=settings)
    core.kubelets = OURS
    core.feed(KubeletAppeared("kubelet-1"))
    core.register()
    return core


@pytest.fixture
def ready() -> Core:
    core = started()
    core.pass_time(limits.LEDGER_QUIET_S + KUBELET_LIST_TAKEN_S)
    assert unmet_prerequisites(core.state) == ()
    return core


def test_a_daemon_that_offers_nothing_is_never_ready() -> None:
    """`--device-plugin off` alone was ready, and served nothing in silence."""
    core = Core(gpu("01:00.0"), settings=replace(SETTINGS, device_plugin=False))
    core.pass_time(limits.LEDGER_QUIET_S + KUBELET_LIST_TAKEN_S)
    (missing,) = unmet_prerequisites(core.state)
    assert missing.startswith("this daemon offers nothing: the device plugin is off, and so are claims")


def test_at_the_start_nothing_is_there() -> None:
    assert unmet_prerequisites(initial_state(SETTINGS)) == (
        "the node's PCI functions have not been read yet",
        "kubelet's ledger: it has not been read yet",
        "kubelet's socket has not been looked for yet",
    )


def test_a_registered_resource_counts_when_kubelets_own_list_has_been_seen_to_be_ours() -> None:
    core = started()
    (reason,) = unmet_prerequisites(core.state)
    assert reason == f"{H100}: it is registered, and kubelet's own list has not been compared with ours yet"
    core.pass_time(limits.LEDGER_QUIET_S + KUBELET_LIST_TAKEN_S)
    assert unmet_prerequisites(core.state) == ()


def test_a_kubelet_that_does_not_say_what_it_has_is_believed() -> None:
    core = started()
    core.kubelets = None
    assert unmet_prerequisites(core.state) != ()
    core.pass_time(limits.LEDGER_QUIET_S + KUBELET_LIST_TAKEN_S)
    assert unmet_prerequisites(core.state) == ()


def test_another_list_in_kubelet_counts_at_once_and_a_contest_has_the_words_of_inspect(ready: Core) -> None:
    ready.kubelets = ["51", "52"]
    ready.pass_time(limits.LEDGER_QUIET_S + 0.1)
    (reason,) = unmet_prerequisites(ready.state)
    assert reason == f"{H100}: kubelet's own list differed from ours at the last read"
    ready.pass_time(limits.KUBELET_LIST_AGAIN_S)
    (reason,) = unmet_prerequisites(ready.state)
    assert reason == f"{H100}: {ready.state.published.plugins[H100].problem}"
    assert "another plugin serves the same resource" in reason


def test_after_a_lost_stream_it_is_ready_again_when_the_lists_agree_again(ready: Core) -> None:
    ready.feed(StreamEnded(H100, 1))
    assert unmet_prerequisites(ready.state) == (f"{H100}: kubelet's ListAndWatch stream ended",)
    ready.pass_time(REGISTER_BACKOFF_S[1])
    ready.register(2)
    assert "has not been compared" in unmet_prerequisites(ready.state)[0]
    ready.pass_time(limits.LEDGER_QUIET_S + KUBELET_LIST_TAKEN_S)
    assert unmet_prerequisites(ready.state) == ()


def test_a_kubelet_that_is_gone_and_an_unreadable_ledger_are_named(ready: Core) -> None:
    ready.ledger_problem = "PodResources does not answer"
    ready.pass_time(limits.LEDGER_QUIET_S)
    assert unmet_prerequisites(ready.state) == ("kubelet's ledger: PodResources does not answer",)
    ready.feed(KubeletGone("kubelet.sock does not exist"))
    assert unmet_prerequisites(ready.state) == (
        "kubelet's ledger: PodResources does not answer",
        "kubelet.sock does not exist",
    )


def test_who_does_not_serve_is_not_ready(ready: Core) -> None:
    waiting = initial_state(replace(SETTINGS, hand_over=True))
    assert unmet_prerequisites(waiting)[0] == f"this daemon does not serve: it is {Role.TAKING_OVER}"
    ready.feed(ShutdownRequested())
    assert unmet_prerequisites(ready.state)[0] == "this daemon is stopping"


def test_claims_need_their_checkpoint_and_their_slices() -> None:
    core = ClaimCore()
    assert of_claims(core) == ["claims of gpu.nvidia.com: their checkpoint has not been read yet"]
    core.feed(Ticked())
    assert of_claims(core) == ["claims of gpu.nvidia.com: no ResourceSlice has been published yet"]
    published = Publication("gpu.nvidia.com", ServerKeeps.YES, True, 1, 1)
    core.feed(
        SlicesPublished(replace(published, settled=False, problem="the API server is away"), ClaimsOf.GPUS)
    )
    assert of_claims(core) == ["claims of gpu.nvidia.com: the API server is away"]
    core.feed(SlicesPublished(published, ClaimsOf.GPUS))
    assert of_claims(core) == []


def of_claims(core: Core) -> list[str]:
    return [reason for reason in unmet_prerequisites(core.state) if reason.startswith("claims of ")]
