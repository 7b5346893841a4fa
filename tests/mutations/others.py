"""Bugs to plant in what is known of other drivers' claims: each names the test that finds it in seconds."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

_OTHERS: Final = "tests/core/test_others.py"
_TAKEOVER: Final = "tests/core/gpus/test_takeover.py"

OTHERS: Final = (
    Mutation(
        "another driver's claim has its GPU only when kubelet lists it",
        "core/devices/others.py",
        "        if spec.nodes and spec.claim and",
        "        if claims and spec.nodes and spec.claim and",
        f"{_OTHERS}::test_its_file_counts_before_kubelet_lists_the_claim_and_after",
    ),
    Mutation(
        "a CDI file that was removed frees the GPU of a claim that kubelet lists",
        "core/ledger/ledger.py",
        " and not listed.isdisjoint(s.devices)]\n",
        " and listed.isdisjoint(s.devices)]\n",
        f"{_OTHERS}::test_a_file_that_is_removed_while_kubelet_lists_the_claim_frees_nothing",
    ),
    Mutation(
        "a claim whose file is missing has no GPU",
        "core/devices/others.py",
        "    if not missing and (ids or",
        "    if missing or (ids or",
        f"{_OTHERS}::test_without_the_file_each_gpu_that_it_may_be_is_withheld_and_says_so",
    ),
    Mutation(
        "the file of a claim's metadata says that the claim has no GPU",
        "core/devices/others.py",
        "if not (is_metadata(i) or i.startswith(_MANAGEMENT))]\n",
        "if not i.startswith(_MANAGEMENT)]\n",
        f"{_OTHERS}::test_a_metadata_device_says_nothing_of_its_gpu",
    ),
    Mutation(
        "a MIG device is a part of the GPUs of which that is not known, whatever is divided",
        "core/devices/others.py",
        "frozenset(divided or undetermined or ",
        "frozenset(undetermined or divided or ",
        f"{_OTHERS}::test_a_mig_device_is_a_part_of_a_gpu_that_is_divided",
    ),
    Mutation(
        "a doubt takes a GPU from its owner",
        "core/devices/others.py",
        "        for address in doubt.among - owners.keys():\n",
        "        for address in doubt.among:\n",
        f"{_OTHERS}::test_without_the_file_each_gpu_that_it_may_be_is_withheld_and_says_so",
    ),
    Mutation(
        "a free GPU that may be somebody's is opened to see whether it is held",
        "core/reports/snapshot.py",
        "            and group not in index.owned\n",
        "",
        f"{_OTHERS}::test_a_free_gpu_that_may_be_somebodys_is_not_opened_to_see_whether_it_is_held",
    ),
    Mutation(
        "a claim that was taken over is named by its device alone",
        "core/claims/takeover.py",
        "(c.driver, c.uid) == (driver, entry.name.uid)}:\n",
        "(c.driver, c.uid) == (driver, '')}:\n",
        f"{_TAKEOVER}::test_two_sharers_of_a_gpu_and_an_admin_block_no_other_claim",
    ),
)
