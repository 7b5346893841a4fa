"""Bugs to plant in the core of compute domains: the label, readiness, exclusion and tombstones. Each breaks the tests
that it names; most are bugs that NVIDIA's driver has or had (issues 641, 1162)."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

LABEL: Final = "tests/core/domains/test_label.py"
PREPARE: Final = "tests/core/domains/test_prepare.py"
UNPREPARE: Final = "tests/core/domains/test_unprepare.py"
READINESS: Final = "tests/core/domains/test_readiness.py"
ORDERS: Final = "tests/core/domains/test_interleavings.py"
HOST: Final = "tests/core/domains/test_host_part.py"
PUBLISHED: Final = "tests/simulation/test_published_when_registered.py"

DOMAINS: Final = (
    # --- the label ----------------------------------------------------------------------------------------------------
    Mutation(
        "a release removes the label while the next claim waits for it",
        "core/domains/label.py",
        "_KEEPS: Final = OWNING | {ClaimState.WAITING}\n",
        "_KEEPS: Final = _NEEDS | {ClaimState.RESERVED}\n",
        tests=(f"{UNPREPARE}::test_the_timeline_of_641",),
    ),
    Mutation(
        "a claim that waits for its channel does not keep the label",
        "core/domains/label.py",
        "_KEEPS: Final = OWNING | {ClaimState.WAITING}\n",
        "_KEEPS: Final = OWNING\n",
        tests=(ORDERS,),
    ),
    Mutation(
        "a label that is being removed counts as there",
        "core/domains/label.py",
        "    if label.value == domain and not label.is_going:\n",
        "    if label.value == domain:\n",
        tests=(ORDERS,),
    ),
    Mutation(
        "a label goes before the end of its claim is on disk",
        "core/domains/label.py",
        "    return domains.claims.checkpoint > domains.claims.durable\n",
        "    return False\n",
        tests=(f"{LABEL}::test_it_goes_only_when_the_end_of_the_last_claim_is_on_disk",),
    ),
    Mutation(
        "a patch of unknown outcome was not made",
        "core/domains/label.py",
        "    if label.unsure:\n",
        "    if False:\n",
        tests=(LABEL,),
    ),
    Mutation(
        "an operator's label is removed",
        "core/domains/label.py",
        "    if label.value in of.kept or label.value not in label.ours:\n",
        "    if label.value in of.kept:\n",
        tests=(
            f"{LABEL}::test_a_label_edited_by_an_operator_stays_is_named_and_is_put_right_when_they_remove_it",
        ),
    ),
    Mutation(
        "the label is added before the intent is on disk",
        "core/domains/label.py",
        "_NEEDS: Final = OWNING - {ClaimState.RESERVED, ClaimState.RELEASING}\n",
        "_NEEDS: Final = OWNING - {ClaimState.RELEASING}\n",
        tests=(f"{LABEL}::test_it_is_added_only_when_the_intent_is_on_disk",),
    ),
    Mutation(
        "the daemon's claim keeps the label that it is there for",
        "core/domains/label.py",
        "        if config is None or config.kind is not DeviceKind.CHANNEL:\n            continue\n",
        "        if config is None:\n            continue\n",
        tests=(f"{LABEL}::test_the_daemon_s_claim_does_not_hold_it",),
    ),
    Mutation(
        "a stale label stays at the start",
        "core/domains/label.py",
        "    ours = label.ours if of.owning else _with_ours(label, label.found)\n",
        "    ours = label.ours\n",
        tests=(f"{LABEL}::test_a_stale_one_is_removed_at_the_start_also_in_mode_host_managed",),
    ),
    Mutation(
        "a label counts as stale before it is known who has a channel",
        "core/domains/label.py",
        "    if label.found is None or not of.is_complete:\n",
        "    if label.found is None:\n",
        tests=(
            f"{LABEL}::test_where_the_checkpoint_is_lost_it_is_stale_or_somebody_s_when_every_claim_has_been_read",
        ),
    ),
    Mutation(
        "a lost label is not put back when the watch tells of it",
        "core/domains/step.py",
        "            return label.touched(domains), []\n",
        "            return domains, []\n",
        tests=(f"{LABEL}::test_it_is_put_back_when_it_is_lost_while_a_claim_lives",),
    ),
    Mutation(
        "conflicts are answered at once for ever",
        "core/domains/label.py",
        "    if after.conflicts >= limits.LABEL_CONFLICTS_MAX:\n",
        "    if False:\n",
        tests=(f"{LABEL}::test_three_conflicts_in_a_row_are_three_new_decisions_and_then_a_pause",),
    ),
    Mutation(
        "another daemon's view of the label counts after a hand-over or before the checkpoint is read",
        "core/domains/step.py",
        "    return state.daemon.role is Role.SERVING and claims.loaded and not claims.unserved\n",
        "    return state.daemon.role is Role.SERVING and not claims.unserved\n",
        tests=(f"{LABEL}::test_nothing_is_removed_before_the_checkpoint_is_read",),
    ),
    # --- readiness ----------------------------------------------------------------------------------------------------
    Mutation(
        "a channel is ready without the daemon's claim",
        "core/domains/exclusion.py",
        "    if not has_daemon(domains, uid):\n",
        "    if False:\n",
        tests=(f"{UNPREPARE}::test_the_daemon_s_claim_that_goes_makes_no_channel_ready_for_the_next_claim",),
    ),
    Mutation(
        "what was Ready before the label was there counts",
        "core/domains/exclusion.py",
        "    if view is None or view.number <= domains.label.added:\n",
        "    if view is None:\n",
        tests=(f"{PREPARE}::test_what_was_ready_before_the_label_was_there_is_read_again",),
    ),
    Mutation(
        "what was Ready while the patch was under way counts",
        "core/domains/label.py",
        "        added=domains.last if is_added else label.added,\n",
        "        added=number if is_added else label.added,\n",
        tests=(f"{PREPARE}::test_what_was_ready_while_the_patch_was_under_way_is_read_again",),
    ),
    Mutation(
        "any node's readiness is ours",
        "core/state/domains.py",
        "            return node in self.clique.ready_nodes\n",
        "            return bool(self.clique.ready_nodes)\n",
        tests=(f"{PREPARE}::test_readiness_of_another_node_is_none_of_this_one",),
    ),
    Mutation(
        "the label goes with the last claim",
        "core/domains/label.py",
        "patch if label.lingers_until <= at else None",
        "patch",
        tests=(f"{LABEL}::test_it_stays_for_the_claim_that_gets_the_channel_next_and_no_longer_than_that",),
    ),
    Mutation(
        "a domain that is being deleted gets its label back",
        "core/domains/label.py",
        "    return view.domain is not None and not view.domain.is_deleted\n",
        "    return view.domain is not None\n",
        tests=(f"{LABEL}::test_a_domain_that_is_being_deleted_gets_no_label_back",),
    ),
    Mutation(
        "a domain that was read before its label went is still there",
        "core/domains/label.py",
        "    if view is None or view.number <= domains.label.absent:\n",
        "    if view is None:\n",
        tests=(f"{LABEL}::test_it_is_not_put_back_before_the_domain_has_been_read_again",),
    ),
    Mutation(
        "a status outranks the clique",
        "core/state/domains.py",
        "        if self.clique is not None:\n",
        "        if self.clique is not None and self.clique.ready_nodes:\n",
        tests=(f"{READINESS}::test_a_clique_without_the_node_outranks_a_status_that_says_ready",),
    ),
    Mutation(
        "the daemon of the label before counts",
        "core/domains/exclusion.py",
        "entry.name.uid not in label_now.before",
        "True",
        tests=(f"{READINESS}::test_a_daemon_that_was_there_before_the_label_does_not_count",),
    ),
    Mutation(
        "a claim of a deleted domain waits its 35 s",
        "core/domains/driver.py",
        "is_final=why.cause is Cause.DOMAIN_NOT_FOUND",
        "is_final=False",
        tests=(
            f"{READINESS}::test_a_claim_that_waits_for_the_daemon_of_a_deleted_domain_is_refused_at_once",
        ),
    ),
    # --- who may have a channel, and what is refused ------------------------------------------------------------------
    Mutation(
        "only prepared claims have a channel",
        "core/domains/exclusion.py",
        "if other.name.uid != entry.name.uid and other.state in OWNING]\n",
        "if other.name.uid != entry.name.uid and other.state is ClaimState.PREPARED]\n",
        tests=(f"{PREPARE}::test_a_channel_belongs_to_one_claim_whatever_that_is_doing",),
    ),
    Mutation(
        "a claim of a lost checkpoint has nothing before it is read again",
        "core/domains/exclusion.py",
        "        if other.domain is None:\n            why",
        "        if other.domain is None:\n            continue\n            why",
        tests=(
            f"{UNPREPARE}::test_what_a_claim_of_a_lost_checkpoint_has_is_nobody_else_s_before_it_is_read",
        ),
    ),
    Mutation(
        "a node takes part in two domains",
        "core/domains/exclusion.py",
        "    if owner := _by_another_domain(domains, entry, config.domain):\n",
        "    if owner := '':\n",
        tests=(f"{PREPARE}::test_a_node_takes_part_in_one_domain_at_a_time",),
    ),
    Mutation(
        "a channel of another namespace's domain is given",
        "core/domains/exclusion.py",
        "domain is not None and entry.name.namespace != domain.namespace:\n",
        "False:\n",
        tests=(f"{PREPARE}::test_what_can_never_be_prepared_is_refused_at_once_and_leaves_nothing",),
    ),
    Mutation(
        "a domainID is joined into a path unchecked",
        "core/domains/config.py",
        "    if not isinstance(domain, str) or not is_domain_id(domain):\n",
        "    if not isinstance(domain, str):\n",
        tests=(f"{PREPARE}::test_a_domain_id_that_is_no_uuid_is_refused_and_leaves_nothing_anywhere",),
    ),
    # --- tombstones and repeated prepares -----------------------------------------------------------------------------
    Mutation(
        "an unprepare is forgotten at once",
        "core/claims/progress.py",
        "            remembered = replace(entry, retry_at=at + limits.CLAIM_TOMBSTONE_S)\n",
        "            remembered = replace(entry, retry_at=at)\n",
        tests=(f"{UNPREPARE}::test_an_unprepare_is_remembered_by_uid_for_90_s",),
    ),
    Mutation(
        "a late prepare of a claim never seen is taken at its word",
        "core/domains/exclusion.py",
        "    if view is None or view.number <= entry.since:\n",
        "    if view is None:\n",
        tests=(f"{PREPARE}::test_the_domain_is_looked_up_before_any_directory_is_made",),
    ),
    Mutation(
        "a prepare that was repeated is refused for what has passed",
        "core/claims/progress.py",
        "        entry = replace(entry, why=None)  # it may have waited until its devices were back\n",
        "",
        tests=(ORDERS,),
    ),
    # --- what the host gives ------------------------------------------------------------------------------------------
    Mutation(
        "a claim of all channels gets the one that it was allocated",
        "core/domains/cdi.py",
        " if own.every else allocated\n",
        " if False else allocated\n",
        tests=(f"{HOST}::test_all_channels_are_those_of_the_driver_and_nobody_else_gets_one",),
    ),
    Mutation(
        "a claim of all channels leaves those that it was not allocated to others",
        "core/values/domain_reservation.py",
        "    if config.kind is DeviceKind.CHANNEL and config.mode is AllocationMode.ALL:\n",
        "    if False:\n",
        tests=(f"{PREPARE}::test_mode_all_gives_every_channel_of_the_node_and_stands_in_the_way_of_each",),
    ),
    Mutation(
        "an unknown clique is no fabric",
        "core/domains/exclusion.py",
        "    if imex.unknown:\n",
        "    if False:\n",
        tests=(f"{HOST}::test_an_unknown_clique_is_not_no_fabric",),
    ),
    Mutation(
        "NVIDIA's daemon is prepared without the host's nvidia-imex",
        "core/domains/exclusion.py",
        "    if kind is DeviceKind.DAEMON and imex.unmanaged:\n",
        "    if False:\n",
        tests=(
            f"{HOST}::test_a_daemon_without_the_device_waits_and_is_told_what_to_do_until_the_toolkit_has_made_it",
        ),
    ),
    Mutation(
        "NVIDIA's daemon gets no configuration to begin with",
        "core/domains/driver.py",
        '            PlacedFile(f"{d}/{template.NAME}", template.TEXT) for d in self.directories(state, entry)\n',
        '            PlacedFile(f"{d}/{template.NAME}", template.TEXT) for d in ()\n',
        tests=(f"{HOST}::test_imex_s_configuration_is_in_the_directory_that_the_daemon_has_mounted",),
    ),
    Mutation(
        "a domain's daemon is looked for in the namespace of today only",
        "core/domains/outputs.py",
        "    return next(found, domains.settings.namespaces[0])\n",
        "    return domains.settings.namespaces[0]\n",
        tests=(f"{HOST}::test_the_daemon_is_found_in_the_namespace_of_today_and_in_the_older_one",),
    ),
    Mutation(
        "devices are published before kubelet can ask for them",
        "daemon/claims.py",
        "        await self._registered.wait()\n",
        "        await trio.lowlevel.checkpoint()\n",
        tests=(PUBLISHED,),
    ),
)
