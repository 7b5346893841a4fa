"""Bugs to plant in compute domains, and in facts of the host beside its GPUs: each names the test that finds it."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

DOMAINS: Final = (
    Mutation(
        "one act removes all that a container has left, however much it is",
        "acts/tree.py",
        "            if self._removed > self._entries_max:\n",
        "            if self._removed > self._entries_max**9:\n",
        "tests/acts/test_tree.py::test_one_act_removes_no_more_than_its_bound_and_the_next_goes_on",
    ),
    Mutation(
        "a directory that is still being removed is given to its domain's next daemon",
        "core/domains/exclusion.py",
        "        if other.is_left and own is not None and own.uid != domain:\n",
        "        if other.is_left:\n",
        "tests/core/domains/test_unprepare.py::test_a_directory_that_cannot_be_removed_costs_its_own_domain_only",
    ),
    Mutation(
        "the directory of a domain that another driver's claim has mounted is removed",
        "acts/files.py",
        "                ended -= {domain for domain in ended if domain.encode() in content}\n",
        "                ended -= {domain for domain in ended if not content}\n",
        "tests/acts/test_files.py"
        "::test_directories_of_domains_that_ended_under_nvidias_driver_are_cleared_and_no_other",
    ),
    Mutation(
        "directories are removed where it is not known for which domains there are claims",
        "core/claims/restoration.py",
        "        clear_mounted=owns and (is_over or (says_all and len(domains) == len(entries))),\n",
        "        clear_mounted=owns and (is_over or says_all),\n",
        "tests/core/claims/test_restoration.py"
        "::test_directories_are_left_where_it_is_not_known_for_which_domains_there_are_claims",
    ),
    Mutation(
        "a status counts at once against a clique that has just lost the node",
        "core/domains/exclusion.py",
        "    return view.read_at >= max(prepared_at, view.unready_since) + STATUS_SETTLES_S\n",
        "    return view.read_at >= prepared_at + STATUS_SETTLES_S\n",
        "tests/core/domains/test_readiness.py::test_a_status_that_follows_the_clique_which_has_lost_the_node_makes_nothing_ready",
    ),
    Mutation(
        "a clique without the node lacks it since the last read, and a status never counts",
        "core/domains/reads.py",
        "unready_since=at if view.unready_since == -math.inf else view.unready_since)\n",
        "unready_since=at)\n",
        "tests/core/domains/test_readiness.py::test_a_clique_without_the_node_does_not_outrank_a_status_that_goes_on_to_say_ready",
    ),
    Mutation(
        "the nvidia-persistenced of a driver in a container is not asked",
        "acts/persistenced.py",
        "        for socket in (last_socket,) if last_socket is not None else self.sockets:\n",
        "        for socket in (last_socket,) if last_socket is not None else self.sockets[:1]:\n",
        "tests/acts/test_persistenced.py::test_that_of_a_driver_in_a_container_is_asked_at_the_drivers_root",
    ),
    Mutation(
        "an nvidia-persistenced that never had the GPU is given it back",
        "acts/persistenced.py",
        "        last_socket = self._let_go.pop(address, None) if on else None\n",
        "        last_socket = None\n",
        "tests/acts/test_persistenced.py::test_of_two_each_is_asked_to_let_go_and_the_one_that_did_gets_the_gpu_back",
    ),
    Mutation(
        "addresses that are hidden are no framebuffer",
        "host/preflight.py",
        "    if not any(region.end for region in regions):\n        return None\n",
        "    if not any(region.end for region in regions):\n        return ()\n",
        "tests/cli/doctor/test_preflight.py::test_where_addresses_are_hidden_it_never_passes",
    ),
    Mutation(
        "a clique that the Node's label had is forgotten with the label",
        "host/imex.py",
        "        if facts.clique_id and by_others:\n",
        "        if facts.clique_id and by_others and facts.clique_is_past:\n",
        "tests/host/test_clique.py::test_a_label_that_went_with_nvidias_plugin_is_remembered_and_what_nvml_denies_is_not",
    ),
)
