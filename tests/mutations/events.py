"""Bugs to plant in what is told: Kubernetes Events, and the feature file. Each breaks the tests that it names."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

WHAT: Final = "tests/core/test_kube_events.py"
WHEN: Final = "tests/core/test_event_series.py"
POSTER: Final = "tests/actors/test_event_poster.py"
API: Final = "tests/kube/test_events.py"
KEEPER: Final = "tests/actors/test_feature_keeper.py"
FILE: Final = "tests/observe/test_nfd.py"

EVENTS: Final = (
    Mutation(
        "a daemon that waits for its predecessor tells what that tells",
        "core/reports/kube_events.py",
        "    if state.daemon.stopping or state.daemon.role is not Role.SERVING:\n",
        "    if state.daemon.stopping:\n",
        tests=(f"{WHAT}::test_who_does_not_serve_tells_nothing",),
    ),
    Mutation(
        "one odd read of kubelet's list is told as another plugin",
        "core/reports/kube_events.py",
        "        if registration.is_contested(plugin) and plugin.problem:\n",
        "        if plugin.listing.against:\n",
        tests=(f"{WHAT}::test_a_resource_that_another_plugin_has_taken",),
    ),
    Mutation(
        "what the daemon refuses for itself is told",
        "core/reports/kube_events.py",
        "_OUR_OWN: Final = frozenset({Cause.NOT_SERVING, Cause.INVALID_REQUEST})\n",
        "_OUR_OWN: Final = frozenset({Cause.NOT_SERVING})\n",
        tests=(f"{WHAT}::test_what_the_daemon_refuses_for_itself_is_not_told",),
    ),
    Mutation(
        "what passes by itself is told",
        "core/reports/event_series.py",
        "        settled_at = self.since + limits.EVENT_SETTLE_S if self.lasts else self.since\n",
        "        settled_at = self.since\n",
        tests=(f"{WHEN}::test_what_passes_by_itself_is_not_told",),
    ),
    Mutation(
        "what comes and goes is told each time",
        "core/reports/event_series.py",
        "        return max(self.not_before, settled_at, self.told_at + limits.EVENT_AGAIN_S)\n",
        "        return max(self.not_before, settled_at)\n",
        tests=(f"{WHEN}::test_what_comes_and_goes_is_told_again_only_after_a_while_and_counted",),
    ),
    Mutation(
        "a refused call is told again and again while no other one comes",
        "core/reports/event_series.py",
        "EVENT_REPEAT_S) if self.lasts else math.inf\n",
        "EVENT_REPEAT_S)\n",
        tests=(
            f"{WHEN}::test_what_happened_in_a_moment_is_told_at_once_and_only_again_when_it_happens_again",
        ),
    ),
    Mutation(
        "a request that fails costs no token",
        "core/reports/event_series.py",
        "    return replace(filled, tokens=filled.tokens - 1.0), event\n",
        "    return filled, event\n",
        tests=(f"{WHEN}::test_what_could_not_be_told_is_tried_again_and_costs_a_token",),
    ),
    Mutation(
        "what went is told when its turn comes",
        "core/reports/event_series.py",
        "        event: known if event in holds else replace(known, since=math.inf)\n",
        "        event: known\n",
        tests=(WHEN,),
    ),
    Mutation(
        "a server that is away is logged at each try",
        "actors/event_poster.py",
        "        if not self._failures:\n",
        "        if True:\n",
        tests=(f"{POSTER}::test_a_server_that_is_away_gets_the_event_when_it_is_back",),
    ),
    Mutation(
        "a refused event is tried again at once",
        "actors/event_poster.py",
        "        again_s = limits.EVENT_AGAIN_S if self._is_lasting(event, error) else wait_s\n",
        "        again_s = 0.0\n",
        tests=(f"{POSTER}::test_a_server_that_refuses_is_logged_once_and_asked_rarely",),
    ),
    Mutation(
        "an overloaded server has refused the event",
        "actors/event_poster.py",
        " or error.code >= 500 or error.code == 429:\n",
        " or error.code >= 500:\n",
        tests=(f"{POSTER}::test_a_server_that_asks_for_patience_gets_the_event_after_it",),
    ),
    Mutation(
        "the first 403 of a server that has just started counts as its last word",
        "actors/event_poster.py",
        "        return tries >= limits.EVENT_FORBIDDEN_TRIES\n",
        "        return True\n",
        tests=(f"{POSTER}::test_a_server_that_has_not_read_its_roles_yet_gets_the_event_when_it_has",),
    ),
    Mutation(
        "only the first pod of a claim is told",
        "actors/event_poster.py",
        "        for about in await self._about(event):\n",
        "        for about in (await self._about(event))[:1]:\n",
        tests=(f"{POSTER}::test_a_claim_that_waits_is_told_to_each_of_its_pods",),
    ),
    Mutation(
        "an event that the server has forgotten stays forgotten",
        "kube/events.py",
        "                if exc.code != 404:  # else the server has forgotten it\n",
        "                if True:\n",
        tests=(f"{API}::test_one_that_the_server_has_forgotten_is_made_anew",),
    ),
    Mutation(
        "the pods of a claim that was made anew under its name are told of the old one",
        "kube/claims.py",
        "        if stored is None or stored.metadata.uid != claim.uid:\n",
        "        if stored is None:\n",
        tests=(f"{API}::test_the_pods_of_a_claim_are_those_it_is_reserved_for",),
    ),
    Mutation(
        "a daemon that serves again does not write what it had written",
        "actors/feature_keeper.py",
        "            written, renew_at = None, math.inf  # the serving daemon writes it\n",
        "            renew_at = math.inf  # the serving daemon writes it\n",
        tests=(f"{KEEPER}::test_a_daemon_that_serves_again_writes_what_it_had_written_before",),
    ),
    Mutation(
        "the feature file expires under a daemon that runs",
        "actors/feature_keeper.py",
        "        elif wanted != written or trio.current_time() >= renew_at:\n",
        "        elif wanted != written:\n",
        tests=(f"{KEEPER}::test_the_file_is_written_once_per_change_and_renewed",),
    ),
    Mutation(
        "NFD reads half of a file",
        "observe/nfd.py",
        'replace_plain(self._path, text.encode("ascii"), _MODE)',
        'Path(self._path).write_bytes(text.encode("ascii"))',
        tests=(f"{FILE}::test_the_file_is_replaced_and_never_written_into",),
    ),
    Mutation(
        "the event of a claim that waits does not say by which resource its pod has the GPU",
        "core/gpus/exclusion.py",
        'f"{of_companion}{given.message}{resource}; {_WAITS}")',
        'f"{of_companion}{given.message}; {_WAITS}")',
        tests=("tests/core/gpus/test_exclusion.py",),
    ),
)
"""Those that `just mutations` plants."""
