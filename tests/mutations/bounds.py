"""Bugs to plant in the bounds: every "at most", every "forgotten when", every "first" and "last".

Only a long run, a crowd or an unlikely order shows such a bug, so each names the test that finds it in seconds.
"""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

BOUNDS: Final = (
    # --- the loops ------------------------------------------------------------------------------------------------
    Mutation(
        "a plugin that goes and one that comes in the same turn are one",
        "actors/registry.py",
        "                break  # a plugin that goes and one that comes under its name are two\n",
        "                pass\n",
        "tests/actors/test_registry.py::test_a_plugin_that_goes_and_one_that_comes_in_its_place_are_two",
    ),
    Mutation(
        "a turn of the registry takes every event that waits",
        "actors/registry.py",
        "    for _ in range(limits.REGISTRY_EVENTS - 1):\n",
        "    while True:\n",
        "tests/actors/test_registry.py::test_a_turn_ends_after_its_bound_of_events_and_others_have_theirs",
    ),
    Mutation(
        "the keys of requests that are over are never forgotten",
        "concurrency/each_once.py",
        "                del done[key]\n",
        "                pass\n",
        "tests/concurrency/test_each_once.py::test_a_key_that_is_not_wanted_any_more_is_forgotten",
    ),
    Mutation(
        "a call that was handed over has 35 s from the hand-over",
        "actors/relay.py",
        "    late_at = trio.current_time() + limits.CLAIM_ANSWER_S\n    answer = await ours(claim)\n",
        "    answer = await ours(claim)\n    late_at = trio.current_time() + limits.CLAIM_ANSWER_S\n",
        "tests/actors/test_relay.py::test_the_time_that_our_core_took_before_the_hand_over_counts",
    ),
    # --- which daemon serves --------------------------------------------------------------------------------------
    Mutation(
        "a daemon asks in its own state directory only",
        "control/unix.py",
        "((device_plugin_dir, node_socket_path), (state_dir, socket_path))",
        "((state_dir, socket_path),)",
        "tests/memory/test_control.py::test_daemons_with_different_state_directories_find_each_other",
    ),
    Mutation(
        "a daemon whose state directory is gone never finds that its successor is",
        "control/unix.py",
        "        nodes = next(iter(self._places.values()))\n",
        "        nodes = [*self._places][-1]\n",
        "tests/memory/test_control.py::test_a_successor_is_gone_also_for_one_whose_state_directory_was_deleted",
    ),
    Mutation(
        "a daemon serves beside one that it cannot ask",
        "control/unix.py",
        "self._endpoints is not None and not self._hanging.value and (",
        "self._endpoints is not None and self._hanging.value and (",
        "tests/memory/test_control.py::test_a_daemon_that_serves_and_cannot_be_asked_is_in_the_way",
    ),
    Mutation(
        "a socket that another daemon has made meanwhile is nobody's loss",
        "control/server.py",
        "            self._is_taken, problem = True, str(exc)\n",
        "            problem = str(exc)\n",
        "tests/memory/test_control.py::test_a_place_that_another_daemon_has_meanwhile_is_lost",
    ),
    # --- kubelet's ledger -----------------------------------------------------------------------------------------
    Mutation(
        "a read of the ledger that failed leaves its connection open",
        "kubelet/ledger.py",
        "        except BaseException:\n            kept.over.set()\n            raise\n",
        "        except BaseException:\n            raise\n",
        "tests/kubelet/test_ledger.py::test_a_read_that_failed_leaves_no_connection_behind",
    ),
    Mutation(
        "of two answers to Allocate for a pod's device only the last one counts",
        "kubelet/ledger.py",
        "                allocated.setdefault((entry.resource_name, device), set()).update(nodes)\n",
        "                allocated[entry.resource_name, device] = {*nodes}\n",
        "tests/kubelet/test_ledger.py::test_an_init_containers_answer_counts_beside_that_of_the_container_after_it",
    ),
    # --- the core -------------------------------------------------------------------------------------------------
    Mutation(
        "a claim that kubelet lists by two names takes one of them",
        "core/claims/takeover.py",
        "    if len(names) != 1:\n",
        "    if not names:\n",
        "tests/core/gpus/test_takeover.py::test_a_claim_that_kubelet_lists_by_two_names_keeps_the_one_of_neither",
    ),
    Mutation(
        "a claim without a name that kubelet lists by two is released as listed by none",
        "core/claims/machine.py",
        " or bool(takeover.listed_as(claims, state, entry))\n",
        "\n",
        "tests/core/gpus/test_takeover.py::test_a_claim_that_kubelet_lists_by_two_names_keeps_the_one_of_neither",
    ),
    Mutation(
        "a poll after the first of two pods has left settles whose use it is",
        "core/assessment/inputs.py",
        "last.poll >= max(orphan.read for orphan in left)\n",
        "last.poll >= min(orphan.read for orphan in left)\n",
        "tests/core/assessment/test_assessments.py::test_a_poll_after_the_first_of_two_pods_settles_nothing_about_the_second",
    ),
    Mutation(
        "the devices of a call count as other pods'",
        "core/deviceplugin/calls.py",
        "was.health is not now.health and (resource, was.id) not in own\n",
        "was.health is not now.health\n",
        "tests/core/test_calls.py::test_a_device_of_the_call_that_gets_healthy_by_it_is_no_other_pods",
    ),
)
