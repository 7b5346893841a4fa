"""Bugs to plant where a failure is to end: with its own request, claim or function."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

EVERY_CALL: Final = "tests/simulation/test_every_call_fails.py"
BUGS: Final = f"{EVERY_CALL}::test_every_call_of_an_actor_fails_once_by_a_bug"
EIO: Final = f"{EVERY_CALL}::test_every_call_of_an_adaptor_fails_once[EIO-claims]"
READER: Final = "tests/host/test_reader.py"
APP: Final = "tests/daemon/test_app.py"
LOCK: Final = "tests/acts/test_state_lock.py"
RAISE_ONLY: Final = "tests/test_adaptors_raise_only.py"

FAILURES: Final = (
    Mutation(
        "a bug in one request ends its actor",
        "actors/raises_only.py",
        "    except Exception as exc:\n",
        "    except ZeroDivisionError as exc:\n",
        tests=(BUGS,),
    ),
    Mutation(
        "a bug in one HTTP request ends the server",
        "http/serve.py",
        "    except Exception as exc:  # ends the request",
        "    except ZeroDivisionError as exc:  # ends the request",
        tests=("tests/http/test_serve.py::test_a_bug_costs_the_request_that_meets_it",),
    ),
    Mutation(
        "a checkpoint that may not be used leaves the claims' GPUs to others",
        "core/claims/machine.py",
        "loaded=True, unserved=event.reason, entries={**found, **claims.entries})",
        "loaded=True, unserved=event.reason)",
        tests=(
            "tests/core/claims/test_restart.py::"
            "test_the_gpu_of_a_claim_is_given_to_nobody_while_the_checkpoint_may_not_be_used",
        ),
    ),
    Mutation(
        "a successor that has no descriptor left to ask with fails as an actor",
        "control/client.py",
        "            except (ConnectError, OSError) as exc:\n",
        "            except ConnectError as exc:\n",
        tests=(
            "tests/simulation/test_every_call_of_a_hand_over_fails.py::"
            "test_every_call_of_a_hand_over_fails_once[EIO]",
        ),
    ),
    Mutation(
        "a lock that the file system does not have is a bug",
        "acts/state_lock.py",
        '            except OSError as error:\n                raise self._unusable("lock", error) from None\n',
        "",
        tests=(f"{RAISE_ONLY}::test_the_lock_of_the_state_raises_its_own_error",),
    ),
    Mutation(
        "an error of inotify's ends the watch of the CDI files",
        "acts/cdi_watch.py",
        "                except OSError:  # no memory",
        "                except ZeroDivisionError:  # no memory",
        tests=(f"{RAISE_ONLY}::test_the_watch_of_the_cdi_files_never_ends",),
    ),
    Mutation(
        "a connection that cannot be closed is a bug",
        "kube/client.py",
        "                with trio.CancelScope(shield=True), suppress(*_FAILURES):\n",
        "                with trio.CancelScope(shield=True):\n",
        tests=(f"{RAISE_ONLY}::test_a_request_raises_errors_of_the_api_server_only",),
    ),
    Mutation(
        "a file that cannot be looked at stays open",
        "process/plain_files.py",
        '    with open(path, "rb", opener=_without_waiting) as file:\n',
        '    with open(_without_waiting(os.fspath(path), 0), "rb") as file:\n',
        tests=(f"{RAISE_ONLY}::test_plain_files_raise_oserror_and_leave_the_old_file",),
    ),
    Mutation(
        "a daemon that offers nothing says nothing",
        "daemon/app.py",
        "            if not offers_anything(daemon.state.value):\n",
        "            if False:\n",
        tests=(
            "tests/process/test_endpoints.py::"
            "test_a_daemon_that_offers_nothing_says_so_once_and_registers_nothing",
        ),
    ),
    Mutation(
        "any actor that fails for ever ends the process",
        "daemon/app.py",
        "    max_failures=None,\n",
        "    max_failures=limits.RESTART_MAX_FAILURES,\n",
        tests=(f"{APP}::test_an_actor_that_fails_for_ever_takes_no_daemon_with_it",),
    ),
    Mutation(
        "sriov_numvfs that cannot be read is a bug",
        "acts/driver.py",
        "            except OSError as error:\n                raise ActError(\n"
        "                    ActFault.REFUSED,\n",
        "            except ZeroDivisionError as error:\n                raise ActError(\n"
        "                    ActFault.REFUSED,\n",
        tests=("tests/acts/test_driver.py::test_whatever_the_writing_process_answers_is_the_acts_error",),
    ),
    Mutation(
        "an error of inotify's ends the watch of kubelet's directory",
        "kubelet/sockets.py",
        "            except OSError:  # what was missed is read",
        "            except ZeroDivisionError:  # what was missed is read",
        tests=(EIO,),
    ),
    Mutation(
        "a scan waits for a function that never answers",
        "host/reader.py",
        "                if scan.read == read and scan.at is not None and not scan.over.is_set():\n",
        "                if scan.read == read and scan.at is None and not scan.over.is_set():\n",
        tests=(f"{READER}::test_a_function_that_never_answers_costs_a_scan_that_function_only",),
    ),
    Mutation(
        "a companion that never answers is left out of its group",
        "host/sysfs.py",
        '            iommu_group=self._iommu_group(name, f"{directory}/iommu_group", []),\n            numa_node=None,',
        "            iommu_group=None,\n            numa_node=None,",
        tests=(f"{READER}::test_a_companion_that_never_answers_is_in_its_group_all_the_same",),
    ),
    Mutation(
        "a writing process that cannot be started ends the daemon's actor",
        "acts/writes.py",
        "            except OSError as error:\n                raise _not_begun(",
        "            except ZeroDivisionError as error:\n                raise _not_begun(",
        tests=("tests/acts/test_writes.py::test_no_process_for_the_writes_is_the_acts_error_and_passes",),
    ),
    Mutation(
        "a read of IMEX that raises ends its actor",
        "actors/domain_reader.py",
        '        with raises_only(HostError, "domain_reader"):\n            facts = await imex.read()\n',
        "        facts = await imex.read()\n",
        tests=(f"{BUGS}[KeyError-domains]",),
    ),
    Mutation(
        "who cannot read whose the claims' state is writes to sysfs",
        "acts/state_lock.py",
        '            return str(self._unusable("read", error))\n',
        '            return ""\n',
        tests=(f"{LOCK}::test_who_cannot_read_whose_the_state_is_begins_no_act",),
    ),
    Mutation(
        "for want of descriptors the state of the claims is read without its lock",
        "acts/state_lock.py",
        "            if shortage(error) is not None:  # of this process: another one may write\n",
        "            if False:\n",
        tests=(f"{LOCK}::test_for_want_of_descriptors_nothing_is_read_without_the_lock",),
    ),
)
