"""Bugs to plant where compute domains meet the API server and the host, as `mutations.py`. Each breaks the tests that
it names: no order of events shows what a server or a driver says.
"""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

NODES: Final = "tests/kube/test_nodes.py"
DOMAINS: Final = "tests/kube/test_domains.py"
IMEX: Final = "tests/host/test_imex.py"
KEEPER: Final = "tests/actors/test_label_keeper.py"
READER: Final = "tests/actors/test_domain_reader.py"
CLIQUE: Final = "tests/host/test_clique.py"
IMEX_CTL: Final = "tests/host/test_imex_ctl.py"

DOMAIN_EDGES: Final = (
    # --- the label ----------------------------------------------------------------------------------------------------
    Mutation(
        "a label is set without a test of what is there",
        "kube/nodes.py",
        '[{"op": "test", "path": path, "value": expected}]',
        "[]",
        tests=(f"{NODES}::test_a_label_that_is_not_as_expected_stays_and_that_is_an_answer",),
    ),
    Mutation(
        "a policy that forbids the label is taken for somebody who was quicker",
        "kube/nodes.py",
        "            if exc.code == 422 and not exc.refusal.name:\n",
        "            if exc.code == 422:\n",
        tests=(f"{NODES}::test_a_policy_that_forbids_the_label_is_no_conflict",),
    ),
    Mutation(
        "the slash of a label divides the path of a patch",
        "kube/nodes.py",
        ".replace('/', '~1')",
        "",
        tests=(f"{NODES}::test_a_patch_is_what_a_real_server_was_asked",),
    ),
    Mutation(
        "all nodes are watched",
        "kube/nodes.py",
        'selector=f"metadata.name={node}", ',
        "",
        tests=(f"{NODES}::test_nothing_but_our_nodes_metadata_is_asked_for_and_nodes_are_not_listed",),
    ),
    Mutation(
        "a watch that has ended is not begun again",
        "kube/nodes.py",
        "        while True:\n",
        "        if True:\n",
        tests=(f"{NODES}::test_a_watch_that_is_too_old_begins_from_what_is",),
    ),
    # --- compute domains ----------------------------------------------------------------------------------------------
    Mutation(
        "a domain is known by its name alone",
        "kube/domains.py",
        "if one.metadata.uid == uid), None)",
        "), None)",
        tests=(f"{DOMAINS}::test_a_domain_that_is_absent_or_made_anew_by_its_name_is_none",),
    ),
    Mutation(
        "every node of a domain is ready",
        "kube/domains.py",
        "for node in nodes if node.status == _READY)",
        "for node in nodes)",
        tests=(f"{DOMAINS}::test_the_nodes_that_are_ready_are_those_of_its_status",),
    ),
    Mutation(
        "every daemon of a clique is ready",
        "kube/domains.py",
        "for daemon in daemons if daemon.status == _READY)",
        "for daemon in daemons)",
        tests=(f"{DOMAINS}::test_a_clique_is_read_by_domain_and_fabric_in_the_drivers_namespace",),
    ),
    Mutation(
        "any 404 means that there is no clique",
        "kube/domains.py",
        "if (said.code, said.kind, said.name) == (404, _CLIQUES, name):",
        "if said.code == 404:",
        tests=(f"{DOMAINS}::test_a_server_without_compute_domains_is_no_absence",),
    ),
    Mutation(
        "what the fabric is called goes into a path as it comes",
        "kube/domains.py",
        "{quote(name, safe='')}",
        "{name}",
        tests=(f"{DOMAINS}::test_what_the_driver_says_of_the_fabric_is_one_part_of_the_path",),
    ),
    # --- IMEX ---------------------------------------------------------------------------------------------------------
    Mutation(
        "a block device's major number is taken for the channels'",
        "host/imex.py",
        '    characters, _, _ = listed.partition("Block devices:")\n',
        "    characters = listed\n",
        tests=(f"{IMEX}::test_a_block_device_of_that_name_is_no_channel",),
    ),
    Mutation(
        "a cluster of zeros is a fabric",
        "core/domains/clique.py",
        '"" if found[1] == _NO_CLUSTER else text',
        "text",
        tests=(f"{IMEX}::test_a_cluster_of_zeros_is_no_fabric",),
    ),
    Mutation(
        "whatever a file says is a clique",
        "core/domains/clique.py",
        "_CLIQUE.fullmatch(text)",
        "re.match('(.*)', text)",
        tests=(f"{IMEX}::test_a_clique_that_is_none_is_named_and_never_taken",),
    ),
    Mutation(
        "a second read begins beside one that hangs",
        "host/threads.py",
        "        while self._running is not None:\n            await self._running.wait()\n",
        "",
        tests=(f"{IMEX}::test_a_read_that_hangs_is_given_up_and_no_second_one_begins_beside_it",),
    ),
    Mutation(
        "NOT_READY is READY, as it has the word in it",
        "host/imex_ctl.py",
        "answer.status == 0 and answer.said == _READY",
        "answer.status == 0 and _READY in answer.said",
        tests=(f"{IMEX_CTL}::test_any_other_answer_is_told_as_it_is",),
    ),
    Mutation(
        "a tool that says READY and fails has said READY",
        "host/imex_ctl.py",
        "answer.status == 0 and answer.said == _READY",
        "answer.said == _READY",
        tests=(f"{IMEX_CTL}::test_any_other_answer_is_told_as_it_is",),
    ),
    Mutation(
        "what a tool has started outlives it",
        "host/asked.py",
        "os.killpg(child.pid, signal.SIGKILL)",
        "child.kill()",
        tests=(f"{IMEX_CTL}::test_a_tool_that_does_not_end_is_killed_with_what_it_has_started",),
    ),
    Mutation(
        "NVML that cannot be asked means that there is no fabric",
        "core/domains/clique.py",
        "        if one.clique_id is not None:\n",
        "        if one.clique_id is not None or not one.is_last:\n",
        tests=(f"{CLIQUE}::test_where_nobody_knows_each_is_named_and_what_to_do",),
    ),
    Mutation(
        "one GPU's fabric counts for all",
        "core/domains/clique.py",
        "    if len(found) > 1:\n",
        "    if len(found) > 99:\n",
        tests=(f"{CLIQUE}::test_all_gpus_must_agree",),
    ),
    # --- actors -----------------------------------------------------------------------------------------------------
    Mutation(
        "a label is patched again when anything else is wanted",
        "concurrency/each_once.py",
        "                if key not in busy and _number(request) > done.get(key, 0):\n",
        "                if key not in busy:\n                    done.pop(key, None)\n",
        tests=(f"{KEEPER}::test_an_order_is_carried_out_once_whatever_else_changes",),
    ),
    Mutation(
        "a label is removed whatever its value is",
        "actors/label_keeper.py",
        "(None, patch.value) if is_added else (patch.value, None)",
        "(None, patch.value) if is_added else ((await node.read()).labels.get(LABEL), None)",
        tests=(f"{KEEPER}::test_a_label_that_is_not_as_it_was_read_stays_and_is_a_conflict",),
    ),
    Mutation(
        "what changed while the Node was not watched is no hint",
        "actors/label_keeper.py",
        "        is_first, seen = True, None\n",
        "        is_first, seen = False, None\n",
        tests=(f"{KEEPER}::test_the_beginning_of_a_watch_is_a_hint",),
    ),
    Mutation(
        "every change of the Node is a hint",
        "actors/label_keeper.py",
        "                if is_first or label != seen:",
        "                if True:",
        tests=(f"{KEEPER}::test_a_touched_label_is_a_hint_and_another_label_is_none",),
    ),
    Mutation(
        "a server that is away is a domain that is gone",
        "actors/domain_reader.py",
        "        return DomainUnreadable(read.number, read.uid, str(exc))\n",
        "        return DomainRead(read.number, read.uid, None)\n",
        tests=(f"{READER}::test_a_server_or_a_host_that_does_not_say_is_told_with_its_reason",),
    ),
    Mutation(
        "the last of many changes is missed",
        "actors/domain_reader.py",
        "                changes.set(changes.value + 1)\n",
        "                changes.set(1)\n",
        tests=(f"{READER}::test_many_changes_at_once_are_one_hint_and_the_last_one_is_not_missed",),
    ),
    Mutation(
        "every change of a domain is a hint of its own",
        "actors/domain_reader.py",
        "            await trio.sleep(limits.DOMAINS_TOUCH_REST_S)\n",
        "",
        tests=(f"{READER}::test_a_domain_that_changes_all_the_time_is_a_hint_twice_a_second",),
    ),
)
