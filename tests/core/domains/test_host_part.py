"""What a claim gets of the host beside its own files: the configuration of IMEX, the device for management, every
channel. And what is refused as long as the host does not say enough."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims.stored import decoded_entry, encoded_entry
from gpuactors.core.domains import template
from gpuactors.core.domains.reads import DOMAIN_READ_S
from gpuactors.core.values.claim import Prepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import NAMESPACES
from gpuactors.core.values.effects import Level
from tests.core.domains.domain_core import (
    DAEMON,
    DOMAIN_SETTINGS,
    IMEX,
    RED,
    DomainCore,
    channel,
    daemon,
    name,
    with_daemon,
)

ONE, TWO = name("one"), name("two")
MANAGEMENT = "management.nvidia.com/gpu=all"
UNKNOWN = "the clique of this node's NVLink fabric is not known: set --clique"
UNMANAGED = "/var/run/cdi has no CDI device: nvidia-ctk cdi generate"


# --- the daemon -----------------------------------------------------------------------------------------------------


def test_imex_s_configuration_is_in_the_directory_that_the_daemon_has_mounted() -> None:
    core = DomainCore(daemon(DAEMON), channel(ONE))
    core.held_back = {"files"}
    core.prepare(DAEMON)
    act = core.wanted.claims.files[DAEMON.uid]
    (placed,) = act.placed
    assert placed.path == f"{act.directories[0]}/imexd.cfg.tmpl"
    assert placed.text == template.TEXT
    core.release("files")
    core.held_back = {"files"}
    core.prepare(DAEMON)
    assert core.wanted.claims.files[DAEMON.uid].placed == (placed,), "at each prepare"


def test_the_configuration_has_the_two_placeholders_and_what_the_daemon_relies_on() -> None:
    lines = [line for line in template.TEXT.splitlines() if not line.startswith("#")]
    found = dict(line.split("=", 1) for line in lines)
    assert found["IMEX_CMD_BIND_INTERFACE_IP"] == "{{.IMEXCmdBindInterfaceIP}}"
    assert found["IMEX_NODE_CONFIG_FILE"] == "{{.IMEXDaemonNodesConfigPath}}"
    assert (found["DAEMONIZE"], found["LOG_FILE_NAME"], found["IMEX_CMD_ENABLED"]) == ("0", "", "1")
    assert template.TEXT.count("{{") == 2, "the comments are no template"


def test_a_channel_places_no_file() -> None:
    core = with_daemon(channel(ONE))
    core.held_back = {"files"}
    core.prepare(ONE)
    assert core.wanted.claims.files[ONE.uid].placed == ()


def test_the_daemon_gets_the_device_for_management_beside_its_own_and_a_channel_does_not() -> None:
    core = DomainCore()
    core.imex = replace(IMEX, management=MANAGEMENT)
    core.created(daemon(DAEMON), channel(ONE))
    core.ready()
    answer = core.answer(core.prepare(DAEMON))
    assert isinstance(answer, Prepared)
    assert answer.devices[0].cdi_ids[-1] == MANAGEMENT
    answer = core.answer(core.prepare(ONE))
    assert isinstance(answer, Prepared)
    assert MANAGEMENT not in answer.devices[0].cdi_ids


def test_the_answer_is_the_same_after_a_restart() -> None:
    core = DomainCore()
    core.imex = replace(IMEX, management=MANAGEMENT)
    first = core.answer(core.prepare(daemon(DAEMON)))
    core = core.restarted()
    assert core.answer(core.prepare(DAEMON)) == first


def test_a_daemon_without_the_device_waits_and_is_told_what_to_do_until_the_toolkit_has_made_it() -> None:
    core = DomainCore()
    core.imex = replace(IMEX, unmanaged=UNMANAGED)
    token = core.prepare(daemon(DAEMON))
    assert (core.answer(token), core.problem(DAEMON)) == (None, UNMANAGED)
    core.imex = replace(IMEX, management=MANAGEMENT)
    core.pass_time(DOMAIN_READ_S)
    assert isinstance(core.answer(token), Prepared)
    core.imex = replace(IMEX, unmanaged=UNMANAGED)
    core.unprepare(DAEMON)
    token = core.prepare(DAEMON)
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert UNMANAGED in core.refusal(token)


def test_a_device_that_is_found_later_changes_nothing_for_a_channel_that_is_prepared() -> None:
    core = with_daemon(channel(ONE))
    core.prepare(ONE)
    core.imex = replace(IMEX, management=MANAGEMENT)
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
    assert core.logged("claim.astray") == []


# --- an unknown clique ----------------------------------------------------------------------------------------------


def test_an_unknown_clique_is_not_no_fabric() -> None:
    core = with_daemon(channel(ONE))
    core.imex = replace(IMEX, clique_id="", unknown=UNKNOWN)
    token = core.prepare(ONE)
    assert (core.answer(token), core.problem(ONE), core.label) == (None, UNKNOWN, None)
    (line,) = [line for line in core.logged("imex.read") if line.level is Level.WARNING]
    assert line.fields["reason"] == UNKNOWN
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert UNKNOWN in core.refusal(token)
    assert core.files.keys() == {DAEMON.uid}


def test_a_clique_that_becomes_known_lets_the_claim_go_on_within_its_call() -> None:
    core = DomainCore()
    core.imex = replace(IMEX, clique_id="", unknown=UNKNOWN)
    token = core.prepare(daemon(DAEMON))
    assert core.problem(DAEMON) == UNKNOWN
    core.imex = IMEX
    core.pass_time(DOMAIN_READ_S)
    assert isinstance(core.answer(token), Prepared)


def test_a_known_node_without_fabric_is_said_once_and_its_claims_are_prepared() -> None:
    core = DomainCore()
    core.imex = replace(IMEX, clique_id="", clique_source="NVML")
    core = core.restarted()
    core.created(daemon(DAEMON), channel(ONE))
    core.says_ready()
    core.prepare(DAEMON)
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
    (line,) = core.logged("imex.read")
    assert (line.level, line.fields["source"]) == (Level.INFO, "NVML")
    (edits,) = core.files[ONE.uid]
    assert "deviceNodes" not in edits.edits  # type: ignore[operator]


# --- every channel --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [64, 2048])
def test_all_channels_are_those_of_the_driver_and_nobody_else_gets_one(count: int) -> None:
    core = DomainCore(settings=replace(DOMAIN_SETTINGS, channels=2))
    core.imex = replace(IMEX, channels=count)
    core.created(daemon(DAEMON), channel(ONE, allocationMode="All"), channel(TWO, device="channel-1"))
    core.ready()
    core.prepare(DAEMON)
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
    (edits,) = core.files[ONE.uid]
    nodes = edits.edits["deviceNodes"]  # type: ignore[index, call-overload]
    assert [n["minor"] for n in nodes] == list(range(count))  # type: ignore[index]
    core.prepare(TWO)
    assert core.problem(TWO) == "channel-1: it belongs to the claim default/one"
    entry = core.entry(ONE)
    assert entry is not None
    assert core.disk is not None
    stored = next(e for e in core.disk.entries if e.name == ONE)
    assert decoded_entry(ONE.uid, encoded_entry(stored)) == stored
    again = core.restarted()
    assert again.files == core.files
    assert again.state.domains.claims.entries[ONE.uid].state is ClaimState.PREPARED


# --- the namespace --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_daemon_is_found_in_the_namespace_of_today_and_in_the_older_one(namespace: str) -> None:
    core = DomainCore(settings=replace(DOMAIN_SETTINGS, namespaces=NAMESPACES))
    of_it = name("daemon", namespace)
    core.created(daemon(of_it), channel(ONE))
    core.prepare(ONE)
    assert isinstance(core.answer(core.prepare(of_it)), Prepared)
    core.held_back = {"domain"}
    core.pass_time(DOMAIN_READ_S)
    (read,) = core.wanted.domains
    assert (read.uid, read.namespace) == (RED, namespace)


def test_a_daemon_of_another_namespace_is_refused() -> None:
    core = DomainCore(settings=replace(DOMAIN_SETTINGS, namespaces=NAMESPACES))
    tenant = name("daemon", "default")
    core.created(daemon(tenant))
    assert "in the namespace dra-driver-nvidia-gpu or nvidia-dra-driver-gpu only" in core.refusal(
        core.prepare(tenant)
    )
