# Recipes for development. `./do RECIPE` makes .venv first and runs them from it; plain `just RECIPE` uses the .venv there is.

set shell := ["bash", "-euo", "pipefail", "-c"]

# "$@" in a recipe keeps an argument with blanks (`-k "binding or books"`) as one word, which {{ }} would not.

set positional-arguments

# A container that sets it for its own sake makes each start compile 600 files anew, and each pytest rewrite 360.

export PYTHONDONTWRITEBYTECODE := ""

export PATH := justfile_directory() / ".venv/bin" + ":" + env("PATH")

# List the recipes.
default:
    @just --list --unsorted

# The main job without a GPU, a cluster or root: the incident, step by step, on a fake node; then how to run on a node.
demo *ARGS:
    gpuactors simulate --scenario incident "$@"
    @echo
    @awk '/^## / { on = ($0 == "## On a node") } on' README.md

# Everything that is checked at each change: style, types, dependency rules, generated code, tests (many wait: three at a time). With a PATH, the tests there alone: `just test tests/core -k binding`.
test *PATH:
    #!/usr/bin/env bash
    set -euo pipefail
    if [ $# -gt 0 ]; then
        exec python -m pytest "$@"
    fi
    just check
    exec python -m pytest -n 3 --dist loadfile

# The tests of this name, wherever they are, with what they print: `just one test_late_bind`.
one TEST *ARGS:
    #!/usr/bin/env bash
    set -euo pipefail
    name=${1%%[*}
    mapfile -t files < <(git grep --untracked -lE "def $name\(" -- 'tests/*test_*.py' ':!tests/node' ':!tests/vm/test_vm.py')
    [ ${#files[@]} -gt 0 ] || { echo "just one: no test is named $name" >&2; exit 1; }
    test=$1; shift
    exec python -m pytest -s -v "${files[@]/%/::$test}" "$@"

# The static half of `test`.
check: gen-check links
    ruff check
    ruff format --check
    mypy
    lint-imports

# Spelling, sentences of more than 40 words, links and anchors of the documents. New words go into docs/words.txt. Seconds.
prose: links
    python -m tests.prose

# Links and anchors of all documents.
links:
    rumdl check --quiet --no-cache --enable MD051,MD057 .

# The kernel's own vfio-pci in virtual machines, two at a time (software emulation; fetches QEMU and kernels from Debian).
vm *ARGS:
    tests/vm/setup
    python -m pytest tests/vm -n 2 --dist worksteal "$@"

# Every scenario on every kernel (on that with iommufd if it was built); `just vm-table` then writes down what was seen.
vm-matrix *ARGS:
    tests/vm/setup
    python -m pytest tests/vm -n 2 --dist worksteal --all-kernels "$@"

# A kernel with iommufd and cdevs, which Debian does not have, from Debian's source. Some minutes, once.
vm-iommufd-kernel *ARGS:
    tests/vm/build-kernel "$@"

# The table of docs/dev/virtual-machine.md, from what the last run of each scenario left.
vm-table *ARGS:
    python -m tests.vm.table "$@"

# A real Kubernetes node, with kubelet, scheduler and API server, runs the daemon as users install it. As root; some minutes; needs a kit of binaries (tests/node/README.md).
node *ARGS:
    python -m tests.node.run "$@"

# A day of a node: pods, claims and compute domains come and go on a real node while components restart, are updated and killed; memory, descriptors and requests are drawn. As root: `just soak --hours 0.5`, with `--seed` the same events again.
soak *ARGS:
    python -m tests.soak.run "$@"

# Every order of up to five events in worlds of two GPUs, or of a card and its part, and of up to four in worlds of claims of a GPU or of compute domains; every interleaving of two claims of one channel: through the core only.
small-worlds LENGTH="5" CLAIMS="4" DOMAINS="4":
    SMALL_WORLDS_LENGTH={{ LENGTH }} python -m pytest -n 2 -rP tests/core/test_small_worlds.py tests/core/kinds/test_mediated_small_world.py -k after_every_order
    SMALL_WORLDS_LENGTH={{ CLAIMS }} python -m pytest -n 2 -rP tests/core/gpus/test_claim_small_worlds.py -k after_every_order
    SMALL_WORLDS_LENGTH={{ DOMAINS }} python -m pytest -n 2 -rP tests/core/domains/test_domain_small_worlds.py -k after_every_order
    DOMAIN_INTERLEAVINGS=all python -m pytest -n 2 -rP tests/core/domains/test_interleavings.py

# Any order of events: the histories that were found once, under nine schedules each; then 2,750 of a whole node, one in four with claims, one in eight with compute domains, one in eight with claims and a second administrator; most pairs of kinds must occur.
histories *ARGS:
    python -m tests.histories --found --histories 2750 --seed commit --min-pairs 95 "$@"

# The same for as long as you like, with other histories each time: `just fuzz --minutes 60`, or with a `--seed`.
fuzz *ARGS:
    python -m tests.histories "$@"

# Each call to the outside raises each of eleven errors once, of the adaptors on real files and of whole nodes in memory; and a daemon is killed at each operation of a prepare and of an unprepare.
failures *ARGS:
    EVERY_ERROR=1 python -m pytest -n 2 --dist worksteal tests/test_adaptors_raise_only.py tests/test_claims_crash.py tests/test_domains_crash.py tests/simulation/test_every_call_fails.py tests/simulation/test_every_call_of_a_hand_over_fails.py "$@"

# Plants bugs in a copy of the program, one after the other, and expects that the two above find them. Half an hour.
mutations *ARGS:
    python -m tests.mutations "$@"

# The same for the real node: bugs planted in the image and the manifests, each found by a scenario. Some minutes.
node-mutations *ARGS:
    python -m tests.node.planted "$@"

# Calls and ledgers that are garbage, 100,000 of them, against a daemon process; kubelet's calls beside them are timed. Minutes.
garbage *ARGS:
    python -m tests.process.garbage --calls 100000 --seconds 1800 "$@"

# Start, calls, events, restarts, claims, memory, commands, idle, each beside its floors; `--against CHECKOUT`: beside another version. 23 minutes; `--help` says what each part takes; `--only start,call:0.2` is some (docs/dev/performance.md).
bench *ARGS:
    @python -m tests.bench.run "$@"

# Write the tables of docs/dev/performance.md from the bench.json that `just bench --output DIR` has left.
bench-table JSON:
    python -m tests.bench.table "$@"

# What the daemons of thousands of nodes ask of the API server (docs/dev/scale.md): in virtual time against the simulated one, then, as root with a kit of binaries, a real one. Minutes; `just scale --nodes 5000` an hour.
scale *ARGS:
    @python -m tests.scale.run "$@"

# Format, and fix what can be fixed automatically.
fmt:
    ruff check --fix
    ruff format

# Render the manifests as `kubectl apply -k deploy/base` would.
kustomize DIR="deploy/base":
    @python -m tests.deploy.tools
    @.venv/tools/kubectl kustomize {{ DIR }}

# Render the chart as `helm install` would: `just chart --set dra.enabled=true`.
chart *ARGS:
    @python -m tests.deploy.tools
    @.venv/tools/helm template gpuactors deploy/chart/gpuactors --namespace gpuactors "$@"

# Build the image of deploy/Containerfile, without a container engine, into var/image; `--arch arm64`: by emulation. As root; a minute (buildah and mmdebstrap from Debian).
image *ARGS:
    @python -m tests.release.image "$@"

# All that a release consists of, into dist/: built twice in two directories, and compared. As root; some minutes.
release:
    @python -m tests.deploy.tools
    @python -m tests.release.make

# Write the address of the documents, `project.urls.Documentation` of pyproject.toml, into the alerts, the dashboard and the chart.
addresses:
    @python -m tests.release.addresses

# Write the shipped pci.ids anew from the package of requirements/pci-ids.txt, and print which resources it renames.
pci-ids:
    @python -m tests.release.pci_ids

# Write deploy/base, the components and the PodMonitor again from the templates of the chart.
overlays:
    @python -m tests.deploy.tools
    python -m tests.deploy.overlays

# Record docs/media/ anew: the terminal's recordings and the picture of the replay page, from real runs. A minute.
recording:
    python -m tests.recording

# Write the lists of the modules that `gpuactors run` and some commands import again.
modules:
    python -m tests.process.test_modules

# Generate the protobuf code of protos/ again.
gen: (_generate "src/gpuactors")

# Fail where the committed protobuf code is not what protos/ generates.
gen-check:
    #!/usr/bin/env bash
    set -euo pipefail
    fresh=$(mktemp -d)
    trap 'rm -rf "$fresh"' EXIT
    just _generate "$fresh"
    for pb in kubelet/pb control/pb; do
        cp "src/gpuactors/$pb/__init__.py" "$fresh/$pb/"
        if ! diff --recursive --unified --exclude=__pycache__ "src/gpuactors/$pb" "$fresh/$pb"; then
            echo "src/gpuactors/$pb is not what protos/ generates: run 'just gen' and commit the result" >&2
            exit 1
        fi
    done

# One directory per file of protos/, because each compiler run writes a package of its own; below the adaptor that uses it.
_generate TO:
    #!/usr/bin/env bash
    set -euo pipefail
    for proto in protos/*.proto; do
        name=$(basename "$proto" .proto)
        case $name in
            control) to={{ TO }}/control/pb/$name ;;
            dra_v1beta1 | dra_health_v1alpha1) continue ;; # their messages are those of v1
            *) to={{ TO }}/kubelet/pb/$name ;;
        esac
        rm -rf "$to"
        mkdir -p "$to"
        python -m grpc_tools.protoc -I protos --python_betterproto2_out="$to" \
            --python_betterproto2_opt=client_generation=async --python_betterproto2_opt=server_generation=async \
            "$proto" 2>&1 | { grep -v '^Writing ' || true; }
        # The marker belongs at the top of the package alone, where it is.
        find "$to" -name py.typed -delete
        # Each class when it is first used, as a start uses few.
        find "$to" -name __init__.py -exec sed -i \
            's/^from dataclasses import dataclass$/from gpuactors.grpc_trio.on_demand import dataclass/' {} +
    done

# Write the tables of the documents that follow from the code, such as the settings in docs/reference.md#configuration.
tables:
    python -m tests.tables

# Resolve the requirements anew: exact versions with hashes, for every Python from 3.11 on.
lock: _uv (_lock "runtime" "pyproject.toml") (_lock "build" "--group build") (_lock "dev" "pyproject.toml --group dev") (_lock "nvml" "pyproject.toml --extra nvml --constraints requirements/runtime.txt") (_lock "helm" "--group helm --no-deps") (_lock "pci-ids" "--group pci-ids --no-deps")

_lock NAME WHAT:
    uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate \
        --no-emit-index-url --no-emit-find-links --custom-compile-command "just lock" \
        --output-file requirements/{{ NAME }}.txt {{ WHAT }}

# uv is needed for `lock` alone, so it is no part of the development requirements.
_uv:
    @command -v uv >/dev/null || python -m pip install --quiet --disable-pip-version-check "uv>=0.9"
