"""Bugs to plant where others connect, and where their files are read and written, as `mutations.py`."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

FUZZ: Final = "tests/fuzz_decoders/test_decoders.py"
FILES: Final = "tests/acts/test_files.py"
WATCH: Final = "tests/acts/test_cdi_watch.py"
NFD: Final = "tests/observe/test_nfd.py"
PLAIN: Final = "tests/process/test_plain_files.py"
SERVE: Final = "tests/http/test_serve.py"
CLAIMS: Final = "tests/process/test_claims.py"

EDGES: Final = (
    Mutation(
        "a newcomer is turned away while slow clients keep their places",
        "http/serve.py",
        "            if not slow:\n",
        "            if slow:\n",
        tests=(SERVE,),
    ),
    Mutation(
        "a probe under way loses its place to a newcomer",
        "http/serve.py",
        "        client.lets_us_wait = False\n",
        "",
        tests=(SERVE,),
    ),
    Mutation(
        "one host takes the places of another one",
        "http/serve.py",
        "            closed = max(slow, key=lambda other: held[other.address])\n",
        "            closed = min(slow, key=lambda other: held[other.address])\n",
        tests=(SERVE,),
    ),
    Mutation(
        "the state is shown to a page in a browser that asks for another host",
        "http/serve.py",
        " and _is_loopback(_without_port(hosts[0]))",
        "",
        tests=(SERVE,),
    ),
    Mutation(
        "the new file has a name that others know, and can take before",
        "process/plain_files.py",
        ".{os.urandom(8).hex()}.new",
        ".new",
        tests=(NFD,),
    ),
    Mutation(
        "a device is opened before it is looked at",
        "process/plain_files.py",
        "    _refuse(os.stat(path).st_mode, path)  # before",
        "    # before",
        tests=(PLAIN,),
    ),
    Mutation(
        "a FIFO under the name of one claim's file is an error of all claims",
        "acts/files.py",
        "        except (FileNotFoundError, NotPlainError):\n",
        "        except FileNotFoundError:\n",
        tests=(FILES,),
    ),
    Mutation(
        "a CDI directory that is removed is missed until somebody makes it",
        "acts/cdi_watch.py",
        "            except OSError:\n                yield\n",
        "            except OSError:\n",
        tests=(WATCH,),
    ),
    Mutation(
        "a number of thousands of digits in /proc/devices ends the read",
        "host/imex.py",
        "_MAJOR.fullmatch(words[0])",
        "words[0].isdecimal()",
        tests=("tests/host/test_imex.py::test_a_number_of_thousands_of_digits_is_none", FUZZ),
    ),
    Mutation(
        "the doctor calls a GPU that outlived its pod as if it had no daemon to ask",
        "cli/doctor/checks/gpus.py",
        "(view.address, view.driver, Cause.ORPHANED)",
        "(view.address, view.driver, Cause.FREE)",
        tests=(
            "tests/cli/doctor/test_node.py::test_a_gpu_that_outlived_its_pod_is_called_as_the_daemon_calls_it",
        ),
    ),
    Mutation(
        "each holder of a GPU that is held at the start is a warning",
        "core/deviceplugin/device_lists.py",
        "Level.INFO if is_meant or entry.id in told else Level.WARNING",
        "Level.INFO if is_meant else Level.WARNING",
        tests=("tests/core/test_device_lists.py::test_a_gpu_that_is_held_at_the_start_is_one_warning",),
    ),
    Mutation(
        "a write that hangs does not say of which GPU it is",
        "acts/writes.py",
        'f"write of {quoted_id(self.text.strip())} to"',
        '"write to"',
        tests=(
            "tests/core/test_kube_events.py::"
            "test_a_claim_whose_bind_hangs_tells_its_pods_the_write_with_the_gpu",
        ),
    ),
    Mutation(
        "any file is taken for pci.ids",
        "host/pci_ids.py",
        "        if not _parse(_read(path), NVIDIA):\n",
        "        if _read(path) is None:\n",
        tests=("tests/host/test_pci_ids.py",),
    ),
    Mutation(
        "what nests too deep for the decoder raises RecursionError",
        "decoding.py",
        "    if _is_deeper(content, depth_max):\n        raise TooDeepError",
        "    if False:\n        raise TooDeepError",
        tests=(FUZZ,),
    ),
    Mutation(
        "half of a surrogate pair in a claim blames the server",
        "decoding.py",
        '    return rb"\\ufffd" if escape["half"] else escape[0]\n',
        "    return escape[0]\n",
        tests=("tests/test_decoding.py",),
    ),
    Mutation(
        "the doctor has another cause than the daemon for a GPU that outlived its pod",
        "cli/doctor/checks/gpus.py",
        "        if (known.address, known.driver, known.cause) == (view.address, view.driver, Cause.ORPHANED):\n",
        "        if (known.address, known.driver, known.cause) == (view.address, view.driver, ''):\n",
        tests=(
            "tests/cli/doctor/test_node.py::test_a_gpu_that_outlived_its_pod_is_called_as_the_daemon_calls_it",
        ),
    ),
    Mutation(
        "each process that is found to hold a GPU is a warning of its own",
        "core/deviceplugin/device_lists.py",
        " if is_meant or entry.id in told else ",
        " if is_meant else ",
        tests=("tests/core/test_device_lists.py::test_a_gpu_that_is_held_at_the_start_is_one_warning",),
    ),
    Mutation(
        "a daemon that offers nothing is ready",
        "core/reports/readiness.py",
        "    if not offers_anything(state):\n",
        "    if False:\n",
        tests=("tests/core/test_readiness.py",),
    ),
    Mutation(
        "the wait that an overloaded server asks for is not read",
        "kube/errors.py",
        "    asked_s = int(retry_after) if _SECONDS.fullmatch(retry_after) else None\n",
        "    asked_s = None\n",
        tests=("tests/kube/test_client.py",),
    ),
    Mutation(
        "a connection that is closed for another one is counted by nobody",
        "http/serve.py",
        "            self._turned_away()\n",
        "",
        tests=(f"{SERVE}::test_the_oldest_slow_client_makes_room_for_a_newcomer",),
    ),
    Mutation(
        "the body of a GET is read to its end",
        "http/serve.py",
        "            return\n        client.lets_us_wait = False\n",
        "            return\n        while http.their_state is h11.SEND_BODY and http.next_event() is h11.NEED_DATA:\n"
        "            http.receive_data(bytes(await client.stream.receive_some(_CHUNK_BYTES)))\n"
        "        client.lets_us_wait = False\n",
        tests=(f"{SERVE}::test_the_body_of_a_get_is_not_read",),
    ),
    Mutation(
        "a container lives on with a CDI directory that the host has removed",
        "daemon/claims.py",
        "reached_by=(kubelet, MountedDirectory(cdi_dir)),",
        "reached_by=(kubelet,),",
        tests=(f"{CLAIMS}::test_a_cdi_directory_that_is_removed_under_its_mount_ends_the_containers_life",),
    ),
    Mutation(
        "what is no file in the features file's place hides what the host says of IMEX",
        "host/imex.py",
        "            if error.errno not in GONE:\n                return Said(",
        "            if error.errno not in GONE:\n                raise HostError(path)\n                return Said(",
        tests=("tests/host/test_imex.py",),
    ),
    Mutation(
        "the parameters for another driver are to nest no deeper than ours",
        "kube/claims.py",
        "without_deep(body)",
        "body",
        tests=(
            "tests/kube/test_client.py::"
            "test_parameters_of_another_driver_that_nest_without_end_cost_the_claim_nothing",
        ),
    ),
)
