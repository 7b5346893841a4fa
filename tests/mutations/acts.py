"""Bugs to plant in the writer of drivers and files, and in what these files say. Each breaks the tests that it names:
they are rules of a contract, and few of them can be met by an order of events.
"""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

DRIVER: Final = "tests/acts/test_driver.py"
MODPROBE: Final = "tests/acts/test_modprobe.py"
WRITES: Final = "tests/acts/test_writes.py"
CHECKPOINT: Final = "tests/acts/test_checkpoint.py"
FILES: Final = "tests/acts/test_files.py"
KUBEVIRT: Final = "tests/acts/test_kubevirt.py"
GROUP: Final = "tests/host/test_group.py"
CDI: Final = "tests/core/claims/test_cdi.py"
CONFIG: Final = "tests/core/gpus/test_config.py"
METADATA: Final = "tests/core/claims/test_metadata.py"
PREBOUND: Final = "tests/core/gpus/test_prebound.py"

ACTS: Final = (
    # --- drivers ----------------------------------------------------------------------------------------------------
    Mutation(
        "bridges are bound with their group",
        "acts/driver.py",
        "        functions = [function for function in group.functions if not function.is_bridge]\n        match",
        "        functions = list(group.functions)\n        match",
        tests=(f"{DRIVER}::test_a_gpu_and_its_companions_go_to_vfio_and_its_bridge_and_other_groups_stay",),
    ),
    Mutation(
        "the host bridge in a GPU's group is bound with it",
        "core/values/model.py",
        '    return class_code.startswith("06") and',
        '    return class_code.startswith("0604") and',
        tests=(f"{GROUP}::test_host_bridges_are_bridges_and_an_nvswitch_is_none",),
    ),
    Mutation(
        "companions are returned in the order in which they were bound",
        "acts/driver.py",
        "self._to_first(functions[::-1], noted)",
        "self._to_first(functions, noted)",
        tests=(f"{DRIVER}::test_they_come_back_in_reverse_order_each_to_its_own_first_driver",),
    ),
    Mutation(
        "a pre-bound GPU is returned",
        "acts/driver.py",
        "            if first.vfio:  # pre-bound",
        "            if first.vfio and bound.driver is None:  # pre-bound",
        tests=(
            f"{DRIVER}::test_a_gpu_that_is_prebound_by_the_operators_word_never_goes_to_the_hosts_driver",
        ),
    ),
    Mutation(
        "what a writing process that was killed has left stays",
        "acts/writes.py",
        "                    if process.poll() and act.left:\n",
        "                    if process.poll() == 0 and act.left:\n",
        tests=(f"{WRITES}::test_after_a_kill_another_process_has_the_last_word",),
    ),
    Mutation(
        "what an administrator wrote after a kill is replaced",
        "acts/writes.py",
        "                    if (await act.read(path)).strip() == killed.written[path].strip():\n",
        "                    if await act.read(path):\n",
        tests=(f"{WRITES}::test_what_somebody_has_written_after_the_kill_stays",),
    ),
    Mutation(
        "a GPU whose files cannot be read counts as gone",
        "acts/driver.py",
        "        except OSError as error:  # it may well be there\n            raise ActError(\n"
        "                ActFault.REFUSED,",
        "        except OSError as error:\n            raise ActError(\n                ActFault.GONE,",
        tests=(f"{DRIVER}::test_a_gpu_whose_files_cannot_be_read_is_not_gone",),
    ),
    Mutation(
        "driver_override is left behind",
        "acts/driver.py",
        '            await writes.at_the_end(override, f"{theirs}\\n")\n',
        "            pass\n",
        tests=(f"{DRIVER}::test_a_gpu_and_its_companions_go_to_vfio_and_its_bridge_and_other_groups_stay",),
    ),
    Mutation(
        "an override that a killed process left stays",
        "acts/driver.py",
        "        for address in plan.leftovers:\n",
        "        for address in ():\n",
        tests=(f"{DRIVER}::test_an_override_that_a_killed_writing_process_left_is_cleared_by_the_next_act",),
    ),
    Mutation(
        "an operator's override is cleared",
        "acts/driver.py",
        '            if "vfio" in await writes.read(path):\n',
        '            if "(null)" not in await writes.read(path):\n',
        tests=(f"{DRIVER}::test_an_operators_override_that_names_no_vfio_driver_stays",),
    ),
    Mutation(
        "a GPU is taken from under its users",
        "acts/driver.py",
        "    if named:\n",
        "    if named and False:\n",
        tests=(
            f"{DRIVER}::test_a_gpu_that_a_container_uses_by_a_node_of_its_own_is_refused_with_the_process",
        ),
    ),
    Mutation(
        "a process that cannot be read is no user",
        "acts/driver.py",
        "    if users.unseen:\n",
        "    if users.unseen and False:\n",
        tests=(f"{DRIVER}::test_a_process_that_cannot_be_read_may_be_a_user",),
    ),
    Mutation(
        "whether a GPU is started is not looked at again before its unbind",
        "acts/driver.py",
        "            if before == _NVIDIA:  # or",
        "            if False:  # or",
        tests=(f"{DRIVER}::test_a_gpu_that_is_started_after_the_first_check_is_seen_before_its_unbind",),
    ),
    Mutation(
        "users are found by the host's paths only",
        "host/group.py",
        "                found[-1, number] = address\n",
        "                pass\n",
        tests=(f"{GROUP}::test_a_node_counts_by_its_device_number_whatever_its_name",),
    ),
    Mutation(
        "virtual functions go with their GPU's driver",
        "acts/driver.py",
        '        if function.has_virtual_functions or count not in ("", "0"):\n',
        "        if False:\n",
        tests=(f"{DRIVER}::test_active_virtual_functions_are_refused",),
    ),
    Mutation(
        "a function that came after the intent is bound",
        "acts/driver.py",
        "            elif first is None:\n",
        "            elif first is None and False:\n",
        tests=(f"{DRIVER}::test_a_function_of_which_no_first_driver_was_noted_is_not_touched",),
    ),
    Mutation(
        "a write that returned is believed",
        "acts/driver.py",
        "            if done(now):\n                return\n            await trio.sleep",
        "            if done(now) or refused is None:\n                return\n            await trio.sleep",
        tests=(f"{DRIVER}::test_a_write_that_changes_nothing_is_an_error",),
    ),
    Mutation(
        "two GPUs of one group block each other",
        "acts/driver.py",
        "            self._turns.setdefault(group.number, trio.Lock()),\n",
        "            trio.Lock(),\n",
        tests=(f"{DRIVER}::test_two_gpus_of_one_group_are_brought_at_once_without_blocking_each_other",),
    ),
    Mutation(
        "nvidia-persistenced gets only the first GPU back",
        "acts/driver.py",
        "                    self._let_go_of.discard(address)\n",
        "                    self._let_go_of.clear()\n",
        tests=(f"{DRIVER}::test_nvidia_persistenced_lets_go_before_and_takes_each_gpu_again_after",),
    ),
    Mutation(
        "vfio-pci wins over a variant driver",
        "host/modules.py",
        "        if wildcards < fewest and",
        "        if (wildcards > fewest or fewest == 8) and",
        tests=(f"{GROUP}::test_the_most_specific_alias_names_the_driver",),
    ),
    Mutation(
        "the lock of a write that hangs goes with the act",
        "acts/writes.py",
        "                pass_fds=(lock,),\n",
        "                pass_fds=(),\n",
        tests=(f"{WRITES}::test_a_write_that_hangs_is_given_up_and_blocks_its_group_only",),
    ),
    Mutation(
        "an act is over before its process has ended",
        "acts/writes.py",
        "                    await self._ended(process, group)\n",
        "                    await trio.lowlevel.checkpoint()\n",
        tests=(
            f"{WRITES}::test_it_writes_reads_and_has_the_last_word",
            f"{WRITES}::test_it_ends_and_frees_its_lock_before_the_act_is_over",
        ),
    ),
    # --- the checkpoint ---------------------------------------------------------------------------------------------
    Mutation(
        "a file is renamed before its content is on the disk",
        "acts/disk.py",
        "    disk.sync(temporary)\n",
        "",
        tests=(
            f"{CHECKPOINT}::test_killed_or_without_power_at_every_operation_the_old_or_the_new_one_is_there",
        ),
    ),
    Mutation(
        "a renamed file is believed to be on the disk",
        "acts/disk.py",
        "    disk.rename(temporary, path)\n    disk.sync_directory(directory)\n",
        "    disk.rename(temporary, path)\n    del directory\n",
        tests=(
            f"{CHECKPOINT}::test_killed_or_without_power_at_every_operation_the_old_or_the_new_one_is_there",
        ),
    ),
    Mutation(
        "a directory that a killed daemon made is never synced",
        "acts/disk.py",
        "            disk.make_directory(path)\n    # Also",
        "            disk.make_directory(path)\n    else:\n        return\n    # Also",
        tests=(f"{CHECKPOINT}::test_a_directory_that_a_killed_daemon_made_is_synced_by_the_next_one",),
    ),
    Mutation(
        "the second start after a corrupt checkpoint takes it for none",
        "acts/checkpoint.py",
        "        if aside := self._corrupt_ones(_CORRUPT) or self._corrupt_ones(_OLD_CORRUPT):\n",
        "        if False and (aside := self._corrupt_ones(_CORRUPT)):\n",
        tests=(f"{CHECKPOINT}::test_a_corrupt_one_is_set_aside_and_said_and_never_taken_for_an_empty_one",),
    ),
    Mutation(
        "the checksum is not looked at",
        "acts/checkpoint.py",
        "        if sha256(body).hexdigest() != checksum:\n",
        "        if False and checksum:\n",
        tests=(f"{CHECKPOINT}::test_a_corrupt_one_is_set_aside_and_said_and_never_taken_for_an_empty_one",),
    ),
    Mutation(
        "a checkpoint outlives its boot",
        "acts/checkpoint.py",
        "        if boot_id != self._boot_id:\n",
        "        if boot_id != self._boot_id and False:\n",
        tests=(f"{CHECKPOINT}::test_after_a_reboot_it_counts_as_empty",),
    ),
    Mutation(
        "a newer daemon's checkpoint is taken for ours",
        "acts/checkpoint.py",
        "        if version > VERSION:\n",
        "        if version > VERSION + 9:\n",
        tests=(f"{CHECKPOINT}::test_a_newer_one_is_refused_and_nothing_is_touched",),
    ),
    Mutation(
        "a newer daemon's fields are lost in a downgrade",
        "core/claims/checkpoint.py",
        "        **checkpoint.unknown,\n",
        "",
        tests=(f"{CHECKPOINT}::test_fields_of_a_newer_daemon_are_kept_through_a_downgrade",),
    ),
    # --- a claim's files --------------------------------------------------------------------------------------------
    Mutation(
        "a mounted metadata file is replaced by rename",
        "acts/files.py",
        "        if there is None:\n            replace(self._disk, path, content)\n            return\n",
        "        if there != content:\n            replace(self._disk, path, content)\n            return\n",
        tests=(f"{FILES}::test_a_mounted_metadata_file_is_rewritten_in_place",),
    ),
    Mutation(
        "a temporary file is one that a CDI reader takes",
        "acts/disk.py",
        '    return os.path.join(directory, f".{name}.new")\n',
        '    return os.path.join(directory, f"{name}.new.json")\n',
        tests=(f"{FILES}::test_a_temporary_file_is_none_that_a_cdi_reader_takes",),
    ),
    Mutation(
        "the devices of a claim that ends go after what is mounted",
        "acts/files.py",
        "            unlink_if_there(self._disk, self._devices_path(uid))\n"
        "            unlink_if_there(self._disk, self._mounts_path(uid))\n",
        "            unlink_if_there(self._disk, self._mounts_path(uid))\n"
        "            unlink_if_there(self._disk, self._devices_path(uid))\n",
        tests=(f"{FILES}::test_what_a_container_would_be_started_with_goes_first",),
    ),
    Mutation(
        "a removal that a killed daemon did not sync is undone by a power cut",
        "acts/files.py",
        "            with suppress(FileNotFoundError):\n                self._disk.remove_directory(directory)\n"
        "            self._sync(self._metadata_dir)\n",
        "            with suppress(FileNotFoundError):\n                self._disk.remove_directory(directory)\n",
        tests=(f"{FILES}::test_removing_leaves_nothing_not_even_after_a_power_cut_and_again_is_no_error",),
    ),
    Mutation(
        "a device has the nodes of both backends",
        "core/gpus/cdi.py",
        '        found = [f"/dev/vfio/devices/{cdev}" for cdev in cdevs]\n',
        '        found = [f"/dev/vfio/{functions[0].iommu_group}"]\n'
        '        found += [f"/dev/vfio/devices/{cdev}" for cdev in cdevs]\n',
        tests=(f"{CDI}::test_a_device_has_the_nodes_of_one_backend",),
    ),
    Mutation(
        "the API device is not given unless it is asked for",
        "core/gpus/config.py",
        "    enable_api_device: bool = True\n",
        "    enable_api_device: bool = False\n",
        tests=(f"{CONFIG}::test_without_any_configuration_the_api_device_is_given_as_kubevirt_needs_it",),
    ),
    Mutation(
        "a configuration of the parent request misses its subrequests",
        "core/claims/opaque_config.py",
        '    return not requests or request in requests or request.partition("/")[0] in requests\n',
        "    return not requests or request in requests\n",
        tests=(f"{CONFIG}::test_a_configuration_of_the_parent_request_covers_its_subrequests",),
    ),
    Mutation(
        "the class's configuration wins over the claim's",
        "core/claims/opaque_config.py",
        "key=lambda c: not c.from_class)",
        "key=lambda c: c.from_class)",
        tests=(f"{CONFIG}::test_the_claims_configuration_wins_whatever_the_order_of_the_list",),
    ),
    Mutation(
        "the metadata of a request is mounted with each of its devices",
        "core/claims/cdi.py",
        "            mounted.add(result.base_request)\n",
        "",
        tests=(f"{CDI}::test_the_metadata_is_mounted_once_a_request_behind_its_first_device",),
    ),
    Mutation(
        "the metadata has only the newest version",
        "core/claims/metadata.py",
        'VERSIONS: Final = ("metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1")\n',
        'VERSIONS: Final = ("metadata.resource.k8s.io/v1beta1",)\n',
        tests=(KUBEVIRT,),
    ),
    Mutation(
        "the metadata of a template's claim is where that of a claim of its own name is",
        "core/claims/metadata.py",
        "    if claim.pod_claim_name is None:\n        kind",
        "    if True:\n        kind",
        tests=(f"{KUBEVIRT}::test_a_claim_of_a_template_by_the_name_that_the_vm_has_for_it",),
    ),
    # --- pre-bound --------------------------------------------------------------------------------------------------
    Mutation(
        "our own bind makes a GPU pre-bound",
        "core/values/prebound.py",
        "        by_others = address not in acted and seen",
        "        by_others = seen",
        tests=(f"{PREBOUND}::test_a_retry_after_our_own_bind_does_not_change_the_first_driver",),
    ),
    Mutation(
        "a GPU of which nothing is known is returned",
        "core/values/prebound.py",
        '            True, Rule.UNKNOWN, "which driver',
        '            False, Rule.UNKNOWN, "which driver',
        tests=(f"{PREBOUND}::test_with_the_checkpoint_lost_a_gpu_on_vfio_counts_as_prebound",),
    ),
    Mutation(
        "a hint of the kernel command line is for all of its vendor",
        "core/values/prebound.py",
        "            and self.device in (_ANY, device)\n",
        "",
        tests=(f"{PREBOUND}::test_a_hint_compares_vendor_and_device_and_class",),
    ),
    # --- which write has not returned --------------------------------------------------------------------------------
    Mutation(
        "a writing process does not say what it writes",
        "acts/writer_process.py",
        "                    note(lock, request)\n",
        "                    pass\n",
        tests=(WRITES,),
    ),
    Mutation(
        "a write that has returned is said to be under way",
        "acts/writer_process.py",
        '            note(lock, "")\n',
        "",
        tests=(WRITES,),
    ),
    Mutation(
        "a module that could not be loaded is tried again at once",
        "acts/modprobe.py",
        "        if self._now() < until:\n",
        "        if self._now() > until + limits.MODPROBE_AGAIN_S:\n",
        tests=(MODPROBE,),
    ),
    Mutation(
        "what modprobe says of itself is believed",
        "acts/modprobe.py",
        "        if found is not None:\n            return found\n",
        "        if found is not None or not why:\n            return driver\n",
        tests=(MODPROBE,),
    ),
)
