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
from tests.core.builders import H100, Core, gpu


def registered(core: Core, stream: int = 1) -> Core:
    """Kubelet appears, the socket is bound, Register is answered, the stream opens."""
    core.feed(KubeletAppeared("kubelet-1"))
    core.register(stream)
    assert is_registered(core.plugin)
    assert core.plugin.problem is None
    return core


def test_a_new_resource_makes_its_socket_and_waits_for_kubelet() -> None:
    core = Core(gpu("01:00.0"))
    assert (order(core.plugin).bind, order(core.plugin).register) == (1, 0)
    core.feed(KubeletGone("waiting for kubelet: kubelet.sock does not exist"))
    core.feed(SocketBound(H100, 1))
    assert order(core.plugin).register == 0
    assert core.plugin.problem == "waiting for kubelet: kubelet.sock does not exist"
    core.feed(KubeletAppeared("k1"))
    core.feed(SocketBound(H100, core.plugin.bind))
    assert order(core.plugin).register == 1


def test_the_stream_may_open_before_registers_answer_is_noticed() -> None:
    core = Core(gpu("01:00.0"))
    core.feed(KubeletAppeared("k1"))
    core.feed(SocketBound(H100, core.plugin.bind))
    core.feed(StreamOpened(H100, 1), RegisterAnswered(H100, core.plugin.register))
    assert is_registered(core.plugin)
    assert core.plugin.retry_at is None


def test_a_stream_that_opened_and_ended_before_registers_answer_leads_to_registering_again() -> None:
    core = Core(gpu("01:00.0"))
    core.feed(KubeletAppeared("k1"))
    core.feed(SocketBound(H100, core.plugin.bind))
    core.feed(StreamOpened(H100, 1), StreamEnded(H100, 1), RegisterAnswered(H100, core.plugin.register))
    assert not is_registered(core.plugin)
    assert core.plugin.retry_at == core.at


def test_accepted_without_a_stream_registers_again_after_the_deadline() -> None:
    core = Core(gpu("01:00.0"))
    core.feed(KubeletAppeared("k1"))
    core.feed(SocketBound(H100, core.plugin.bind))
    core.feed(RegisterAnswered(H100, core.plugin.register))
    bind = core.plugin.bind
    core.feed(Ticked(), after_s=STREAM_OPEN_DEADLINE_S)
    assert core.plugin.bind == bind + 1


def test_a_lost_stream_that_had_lasted_registers_at_once() -> None:
    core = registered(Core(gpu("01:00.0")))
    before = core.plugin
    core.feed(StreamEnded(H100, 1), after_s=60)
    assert core.plugin.retry_at == core.at
    core.feed(Ticked())
    assert core.plugin.bind == before.bind + 1
    core.feed(SocketBound(H100, core.plugin.bind))
    assert core.plugin.register == before.register + 1


def test_streams_that_end_at_once_are_not_answered_with_a_tight_loop() -> None:
    core = registered(Core(gpu("01:00.0")))
    waits = []
    for stream in range(1, 12):
        core.feed(StreamEnded(H100, stream), after_s=0.001)
        retry_at = core.plugin.retry_at
        assert retry_at is not None
        waits.append(retry_at - core.at)
        core.feed(Ticked(), after_s=waits[-1])
        core.feed(SocketBound(H100, core.plugin.bind))
        core.feed(RegisterAnswered(H100, core.plugin.register), StreamOpened(H100, stream + 1))
    assert waits == pytest.approx([*REGISTER_BACKOFF_S, *REGISTER_BACKOFF_S[-1:] * 3], abs=1e-6)


def test_a_failed_register_is_repeated_even_with_a_stream_open() -> None:
    """Kubelet forgets the client that the stream belongs to when a Register fails."""
    core = registered(Core(gpu("01:00.0")))
    core.feed(StreamEnded(H100, 1), after_s=60)
    core.feed(Ticked())
    core.feed(SocketBound(H100, core.plugin.bind), StreamOpened(H100, 2))
    core.feed(RegisterAnswered(H100, core.plugin.register, "failed to dial device plugin"))
    assert core.plugin.retry_at is not None
    core.feed(Ticked(), after_s=10)
    assert order(core.plugin).renew, "the stream that kubelet has forgotten is ended before it registers"


def test_late_answers_to_old_orders_change_nothing() -> None:
    core = registered(Core(gpu("01:00.0")))
    core.feed(KubeletAppeared("kubelet-2"))
    core.feed(StreamEnded(H100, 1), after_s=0.001)
    core.feed(Ticked(), after_s=1)
    now = core.plugin
    core.feed(
        SocketBound(H100, now.bind - 1), RegisterAnswered(H100, now.register), RegisterAnswered(H100, 1, "x")
    )
    core.feed(SocketFailed(H100, now.bind - 1, "no"))
    assert core.plugin == now


def test_only_the_last_order_to_register_can_be_answered() -> None:
    """The call that an earlier order led to may have been answered by the kubelet before."""
    core = Core(gpu("01:00.0"))
    core.feed(KubeletAppeared("kubelet-1"))
    core.feed(SocketBound(H100, core.plugin.bind))
    first = core.plugin.register
    core.feed(KubeletAppeared("kubelet-2"))
    core.feed(SocketBound(H100, core.plugin.bind))
    waits = core.plugin
    assert waits.registering
    core.feed(RegisterAnswered(H100, first), RegisterAnswered(H100, first, "failed to dial device plugin"))
    assert core.plugin == waits
    core.feed(RegisterAnswered(H100, waits.register, "failed to dial device plugin"))
    assert core.plugin.retry_at is not None, "kubelet-2 has not accepted us"


def test_a_restarted_kubelet_is_registered_with_at_once_when_no_stream_is_left() -> None:
    core = registered(Core(gpu("01:00.0")))
    core.feed(KubeletGone("gone"), after_s=5)
    core.feed(StreamEnded(H100, 1))
    assert core.plugin.problem == "gone"
    assert core.plugin.retry_at is None, "nobody to register with"
    bind = core.plugin.bind
    core.feed(KubeletAppeared("kubelet-2"), after_s=20)
    assert core.plugin.bind == bind + 1
    assert not order(core.plugin).renew


def test_a_new_kubelet_sock_with_the_old_stream_open_waits_a_moment_then_ends_it() -> None:
    core = registered(Core(gpu("01:00.0")))
    core.feed(KubeletAppeared("kubelet-2"))
    bind = core.plugin.bind
    core.feed(Ticked(), after_s=OLD_STREAM_GRACE_S)
    assert core.plugin.bind == bind + 1
    assert order(core.plugin).renew


def test_the_same_kubelet_sock_seen_again_is_no_event() -> None:
    core = registered(Core(gpu("01:00.0")))
    before = core.state
    core.feed(KubeletAppeared("kubelet-1"))
    assert core.state == before


def test_a_bystanders_stream_does_not_hide_the_end_of_kubelets() -> None:
    core = registered(Core(gpu("01:00.0")))
    core.feed(StreamOpened(H100, 2))
    core.feed(StreamEnded(H100, 1), after_s=60)
    assert not is_registered(core.plugin)
    assert core.plugin.retry_at == core.at
    core = registered(Core(gpu("01:00.0")))
    core.feed(StreamOpened(H100, 2), StreamEnded(H100, 2))
    assert is_registered(core.plugin)


def test_a_socket_that_cannot_be_made_is_tried_again_for_ever_and_says_why() -> None:
    core = Core(gpu("01:00.0"))
    core.feed(KubeletAppeared("k1"))
    waits = []
    for _ in range(9):
        core.feed(SocketFailed(H100, core.plugin.bind, "/x is full"))
        retry_at = core.plugin.retry_at
        assert retry_at is not None
        assert core.plugin.problem == "/x is full"
        waits.append(retry_at - core.at)
        core.feed(Ticked(), after_s=waits[-1])
    assert waits == pytest.approx([*limits.SERVE_BACKOFF_S, *limits.SERVE_BACKOFF_S[-1:] * 3])


def test_an_endpoint_that_died_while_registered_is_made_again() -> None:
    core = registered(Core(gpu("01:00.0")))
    core.feed(SocketFailed(H100, core.plugin.bind, "internal error"), StreamEnded(H100, 1))
    core.feed(Ticked(), after_s=limits.SERVE_BACKOFF_S[0])
    core.feed(SocketBound(H100, core.plugin.bind))
    core.feed(RegisterAnswered(H100, core.plugin.register), StreamOpened(H100, 2))
    assert is_registered(core.plugin)
