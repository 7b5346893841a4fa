"""Bugs to plant in what an operator sees of compute domains. Each breaks the test that it names."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

REPORT: Final = "tests/core/domains/test_report.py"
REPLAY: Final = "tests/replay/test_domains.py"

DOMAIN_VIEWS: Final = (
    Mutation(
        "a domain is shown Ready before the look that its claim waits for",
        "core/domains/report.py",
        "        missing = exclusion.lacking(domains, waits)\n",
        "        missing = exclusion.channels_lack(domains, uid)\n",
        tests=(
            f"{REPORT}::test_a_claim_that_a_restart_has_met_waits_for_a_look_of_its_own_and_its_domain_is_not_ready",
        ),
    ),
    Mutation(
        "a domain is shown as not Ready only because nobody has asked since the start",
        "core/domains/report.py",
        '            return DomainStatus.UNREAD, ""\n',
        "            pass\n",
        tests=(f"{REPORT}::test_after_a_restart_readiness_is_unread_where_no_claim_waits_for_it",),
    ),
    Mutation(
        "the label's value after a patch that failed is shown as a fact",
        "core/domains/report.py",
        "    if not known.known or known.unsure:\n",
        "    if not known.known:\n",
        tests=(f"{REPORT}::test_after_a_patch_that_failed_the_label_s_value_is_no_fact",),
    ),
    Mutation(
        "a label that is being removed is shown as set",
        "core/domains/report.py",
        "    elif known.patch is not None:\n",
        "    elif known.patch is not None and not known.is_going:\n",
        tests=(f"{REPORT}::test_the_label_is_said_as_it_is_known",),
    ),
    Mutation(
        "something is missing of a domain whose channels nobody wants",
        "core/domains/report.py",
        "    if not channels:\n",
        "    if False:\n",
        tests=(f"{REPORT}::test_of_a_domain_without_a_channel_here_nothing_is_missing",),
    ),
    Mutation(
        "the timeline of a replay misses what changes of domains alone",
        "replay/lanes.py",
        "        and before.domains is state.domains\n",
        "",
        tests=(f"{REPLAY}::test_the_page_has_a_lane_for_label_domain_and_devices",),
    ),
    Mutation(
        "a read that changes the label or a domain counts as routine in a replay",
        "replay/text.py",
        "        and not any(changes(played.before, played.state))\n",
        "",
        tests=(f"{REPLAY}::test_what_changes_of_label_and_domains_is_told_where_it_does",),
    ),
    Mutation(
        "a replay of one channel shows the claims of every device",
        "replay/domain_choice.py",
        "        return [e for e in domains.claims.entries.values() if self.device in devices_of(domains, e)]\n",
        "        return [*domains.claims.entries.values()]\n",
        tests=(f"{REPLAY}::test_of_one_device_only_its_claims_are_shown",),
    ),
)
