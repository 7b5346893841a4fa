"""Registered means one open stream; whatever is missing is done again, for ever."""

from __future__ import annotations

import pytest

from gpuactors import limits
from gpuactors.core.deviceplugin.registration import (
    OLD_STREAM_GRACE_S,
    REGISTER_BACKOFF_S,
    STREAM_OPEN_DEADLINE_S,
    is_registered,
    order,
)
from gpuactors.core.events.daemon import Ticked
from gpuactors.core.events.deviceplugin import (
    RegisterAnswered,
    SocketBound,
    SocketFailed,
    StreamEnded,
    StreamOpened,
)
from gpuactors.core.events.kubelet import KubeletAppeared, KubeletGone
from gpuactors.core.values.model import PluginState
from tests.core.builders import H100, Core, gpu


def plugin(core: Core) -> PluginState:
    return core.state.published.plugins[H100]


def registered(core: Core, stream: int = 1) -> Core:
    """Kubelet appears, the socket is bound, Register is answered, the stream opens."""
    core.feed(KubeletAppeared("kubelet-1"))
    core.feed(SocketBound(H100, plugin(core).bind))
    core.feed(RegisterAnswered(H100, plugin(core).register), StreamOpened(H100, stream))
    assert is_registered(plugin(core))
    assert plugin(core).problem is None
    return core


def test_a_new_resource_makes_its_socket_and_waits_for_kubelet() -> None:
    core = Core(gpu("01:00.0"))
    assert (order(plugin(core)).bind, order(plugin(core)).register) == (1, 0)
    core.feed(KubeletGone("waiting for kubelet: kubelet.sock does not exist"))
    core.feed(SocketBound(H100, 1))
    assert order(plugin(core)).register == 0
    assert plugin(core).problem == "waiting for kubelet: kubelet.sock does not exist"
    core.feed(KubeletAppeared("k1"))
    core.feed(SocketBound(H100, plugin(core).bind))
    assert order(plugin(core)).register == 1


def test_the_stream_may_open_before_registers_answer_is_noticed() -> None:
    core = Core(gpu("01:00.0"))
    core.feed(KubeletAppeared("k1"))
    core.feed(SocketBound(H100, plugin(core).bind))
    core.feed(StreamOpened(H100, 1), RegisterAnswered(H100, plugin(core).register))
    assert is_registered(plugin(core))
    assert plugin(core).retry_at is None


def test_a_stream_that_opened_and_ended_before_registers_answer_leads_to_registering_again() -> None:
    core = Core(gpu("01:00.0"))
    core.feed(KubeletAppeared("k1"))
    core.feed(SocketBound(H100, plugin(core).bind))
    core.feed(StreamOpened(H100, 1), StreamEnded(H100, 1), RegisterAnswered(H100, plugin(core).register))
    assert not is_registered(plugin(core))
    assert plugin(core).retry_at == core.at


def test_accepted_without_a_stream_registers_again_after_the_deadline() -> None:
    core = Core(gpu("01:00.0"))
    core.feed(KubeletAppeared("k1"))
    core.feed(SocketBound(H100, plugin(core).bind))
    core.feed(RegisterAnswered(H100, plugin(core).register))
    bind = plugin(core).bind
    core.feed(Ticked(), after_s=STREAM_OPEN_DEADLINE_S)
    assert plugin(core).bind == bind + 1


def test_a_lost_stream_that_had_lasted_registers_at_once() -> None:
    core = registered(Core(gpu("01:00.0")))
    before = plugin(core)
    core.feed(StreamEnded(H100, 1), after_s=60)
    assert plugin(core).retry_at == core.at
    core.feed(Ticked())
    assert plugin(core).bind == before.bind + 1
    core.feed(SocketBound(H100, plugin(core).bind))
    assert plugin(core).register == before.register + 1


def test_streams_that_end_at_once_are_not_answered_with_a_tight_loop() -> None:
    core = registered(Core(gpu("01:00.0")))
    waits = []
    for stream in range(1, 12):
        core.feed(StreamEnded(H100, stream), after_s=0.001)
        retry_at = plugin(core).retry_at
        assert retry_at is not None
        waits.append(retry_at - core.at)
        core.feed(Ticked(), after_s=waits[-1])
        core.feed(SocketBound(H100, plugin(core).bind))
        core.feed(RegisterAnswered(H100, plugin(core).register), StreamOpened(H100, stream + 1))
    assert waits == pytest.approx([*REGISTER_BACKOFF_S, *REGISTER_BACKOFF_S[-1:] * 3], abs=1e-6)


def test_a_failed_register_is_repeated_even_with_a_stream_open() -> None:
    """Kubelet forgets the client that the stream belongs to when a Register fails."""
    core = registered(Core(gpu("01:00.0")))
    core.feed(StreamEnded(H100, 1), after_s=60)
    core.feed(Ticked())
    core.feed(SocketBound(H100, plugin(core).bind), StreamOpened(H100, 2))
    core.feed(RegisterAnswered(H100, plugin(core).register, "failed to dial device plugin"))
    assert plugin(core).retry_at is not None
    core.feed(Ticked(), after_s=10)
    assert order(plugin(core)).renew, "the stream that kubelet has forgotten is ended before it registers"


def test_late_answers_to_old_orders_change_nothing() -> None:
    core = registered(Core(gpu("01:00.0")))
    core.feed(KubeletAppeared("kubelet-2"))
    core.feed(StreamEnded(H100, 1), after_s=0.001)
    core.feed(Ticked(), after_s=1)
    now = plugin(core)
    core.feed(
        SocketBound(H100, now.bind - 1), RegisterAnswered(H100, now.register), RegisterAnswered(H100, 1, "x")
    )
    core.feed(SocketFailed(H100, now.bind - 1, "no"))
    assert plugin(core) == now


def test_only_the_last_order_to_register_can_be_answered() -> None:
    """The call that an earlier order led to may have been answered by the kubelet before."""
    core = Core(gpu("01:00.0"))
    core.feed(KubeletAppeared("kubelet-1"))
    core.feed(SocketBound(H100, plugin(core).bind))
    first = plugin(core).register
    core.feed(KubeletAppeared("kubelet-2"))
    core.feed(SocketBound(H100, plugin(core).bind))
    waits = plugin(core)
    assert waits.registering
    core.feed(RegisterAnswered(H100, first), RegisterAnswered(H100, first, "failed to dial device plugin"))
    assert plugin(core) == waits
    core.feed(RegisterAnswered(H100, waits.register, "failed to dial device plugin"))
    assert plugin(core).retry_at is not None, "kubelet-2 has not accepted us"


def test_a_restarted_kubelet_is_registered_with_at_once_when_no_stream_is_left() -> None:
    core = registered(Core(gpu("01:00.0")))
    core.feed(KubeletGone("gone"), after_s=5)
    core.feed(StreamEnded(H100, 1))
    assert plugin(core).problem == "gone"
    assert plugin(core).retry_at is None, "nobody to register with"
    bind = plugin(core).bind
    core.feed(KubeletAppeared("kubelet-2"), after_s=20)
    assert plugin(core).bind == bind + 1
    assert not order(plugin(core)).renew


def test_a_new_kubelet_sock_with_the_old_stream_open_waits_a_moment_then_ends_it() -> None:
    core = registered(Core(gpu("01:00.0")))
    core.feed(KubeletAppeared("kubelet-2"))
    bind = plugin(core).bind
    core.feed(Ticked(), after_s=OLD_STREAM_GRACE_S)
    assert plugin(core).bind == bind + 1
    assert order(plugin(core)).renew


def test_the_same_kubelet_sock_seen_again_is_no_event() -> None:
    core = registered(Core(gpu("01:00.0")))
    before = core.state
    core.feed(KubeletAppeared("kubelet-1"))
    assert core.state == before


def test_a_bystanders_stream_does_not_hide_the_end_of_kubelets() -> None:
    core = registered(Core(gpu("01:00.0")))
    core.feed(StreamOpened(H100, 2))
    core.feed(StreamEnded(H100, 1), after_s=60)
    assert not is_registered(plugin(core))
    assert plugin(core).retry_at == core.at
    core = registered(Core(gpu("01:00.0")))
    core.feed(StreamOpened(H100, 2), StreamEnded(H100, 2))
    assert is_registered(plugin(core))


def test_a_socket_that_cannot_be_made_is_tried_again_for_ever_and_says_why() -> None:
    core = Core(gpu("01:00.0"))
    core.feed(KubeletAppeared("k1"))
    waits = []
    for _ in range(9):
        core.feed(SocketFailed(H100, plugin(core).bind, "/x is full"))
        retry_at = plugin(core).retry_at
        assert retry_at is not None
        assert plugin(core).problem == "/x is full"
        waits.append(retry_at - core.at)
        core.feed(Ticked(), after_s=waits[-1])
    assert waits == pytest.approx([*limits.SERVE_BACKOFF_S, *limits.SERVE_BACKOFF_S[-1:] * 3])


def test_an_endpoint_that_died_while_registered_is_made_again() -> None:
    core = registered(Core(gpu("01:00.0")))
    core.feed(SocketFailed(H100, plugin(core).bind, "internal error"), StreamEnded(H100, 1))
    core.feed(Ticked(), after_s=limits.SERVE_BACKOFF_S[0])
    core.feed(SocketBound(H100, plugin(core).bind))
    core.feed(RegisterAnswered(H100, plugin(core).register), StreamOpened(H100, 2))
    assert is_registered(plugin(core))
