"""Bugs to plant where a node is taken over from NVIDIA's DRA driver, as `mutations.py`."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

FILE: Final = "tests/acts/test_checkpoint.py"
GPUS: Final = "tests/core/gpus/test_takeover.py"
DOMAINS: Final = "tests/core/domains/test_takeover.py"

TAKEOVER: Final = (
    Mutation(
        "NVIDIA's checkpoint is taken for a corrupt one of ours",
        "core/claims/theirs.py",
        "    return Whose.THEIRS if _THEIRS.match(content) else Whose.NOBODYS\n",
        "    return Whose.OURS\n",
        tests=(f"{FILE}::test_nvidias_is_read_and_never_touched",),
    ),
    Mutation(
        "of our two files the one by the new name is the newer",
        "acts/checkpoint.py",
        "        if is_ours and touches:\n",
        "        if is_ours and touches and self._content(self._path) is None:\n",
        tests=(f"{FILE}::test_ours_under_the_old_name_is_the_newest_an_older_daemon_has_written_it",),
    ),
    Mutation(
        "a claim that NVIDIA's driver prepared in another boot is held",
        "acts/theirs.py",
        '        if found.boot_id not in ("", boot_id):\n',
        "        if False:\n",
        tests=(f"{FILE}::test_nvidias_of_another_boot_has_no_claim_of_this_one",),
    ),
    Mutation(
        "a claim that has ended here is taken over again at each start",
        "core/claims/restoration.py",
        "    if theirs is None or theirs.checksum == checkpoint.taken_from:\n",
        "    if theirs is None:\n",
        tests=("tests/core/claims/test_restoration.py",),
    ),
    Mutation(
        "what was taken over stands among our own claims, which an older daemon cannot read",
        "core/claims/restoration.py",
        "        (taken_over if is_theirs else claims)[uid] = {**before, **encoded_entry(entry)}\n",
        "        claims[uid] = {**before, **encoded_entry(entry)}\n",
        tests=("tests/core/claims/test_restoration.py",),
    ),
    Mutation(
        "a claim that was taken over is prepared anew",
        "core/values/claim_states.py",
        "    (_S.TAKEN_OVER, _E.PREPARE): (_S.TAKEN_OVER, _R.NOTHING),\n",
        "    (_S.TAKEN_OVER, _E.PREPARE): (_S.FETCHING, _R.FETCH),\n",
        tests=(GPUS, DOMAINS),
    ),
    Mutation(
        "the scheduler is not told of a GPU that it knows by another name",
        "core/gpus/offer.py",
        "    claimed = owner is not None and owner.device == device_name(function.address)\n",
        "    claimed = owner is not None\n",
        tests=(f"{GPUS}::test_the_scheduler_is_told_as_it_knows_the_gpu_by_another_name",),
    ),
    Mutation(
        "a channel that kubelet lists for an unknown claim is free",
        "core/domains/exclusion.py",
        "        if stranger.claim != str(entry.name) and device_of(stranger.device) in wanted:\n",
        "        if False:\n",
        tests=(DOMAINS,),
    ),
    Mutation(
        "a label is stale although kubelet lists a channel for an unknown claim",
        "core/domains/label.py",
        "    is_complete = domains.strangers is not None and not any(\n",
        "    is_complete = domains.strangers is not None or not any(\n",
        tests=(DOMAINS,),
    ),
    Mutation(
        "the parameters in NVIDIA's checkpoint are to nest no deeper than we decode",
        "acts/theirs.py",
        "decode_json(without_deep(content, _DEPTH_MAX), _Checkpoint)",
        "decode_json(content, _Checkpoint)",
        tests=(f"{FILE}::test_the_parameters_in_nvidias_are_not_decoded",),
    ),
    Mutation(
        "the parameters in NVIDIA's checkpoint are decoded",
        "acts/theirs.py",
        "    devices: _Allocated | None = None\n",
        "    devices: Any = None\n",
        tests=(f"{FILE}::test_the_parameters_in_nvidias_are_not_decoded",),
    ),
)
