#!/bin/sh
# ./do RECIPE…  sets up what development needs, once, then runs `just RECIPE…` (see justfile; alone it lists them).
#
# Needs git and Python >= 3.11, nothing else: neither pip nor venv need to work on the system. Everything goes into
# .venv of this checkout, in the versions and with the hashes of requirements/dev.txt. What only Debian can provide
# (venv itself, libudev, systemd-analyze for the tests) is installed with apt as root or by sudo, or asked for in one sentence.
set -eu
cd "$(dirname "$0")"
here=$(pwd -P)

say() { printf './do: %s\n' "$*" >&2; }
die() { say "$*"; exit 69; } # EX_UNAVAILABLE, sysexits.h

# system_package PACKAGE WHY: have apt install PACKAGE, or say what to do and end.
system_package() {
    if ! command -v apt-get >/dev/null 2>&1; then
        die "$2 is missing and there is no apt-get here: install it with this system's package manager, then try again."
    elif [ "$(id -u)" = 0 ]; then
        as_root=
    elif command -v sudo >/dev/null 2>&1 && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
        as_root=sudo
    else
        die "$2 is missing: run 'apt-get install $1' as root, then try again."
    fi
    say "$2 is missing: installing Debian's package $1"
    # Lists first: a fresh machine has none, and old ones name packages that the mirror no longer has.
    if ! $as_root apt-get -qq update ||
        ! $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$1" >/dev/null; then
        die "apt-get could not install $1 (its words are above): install it, then try again."
    fi
}

# program_of PACKAGE PROGRAM: that one program of a Debian package into .venv/bin. The package is not installed: it would start
# a server.
program_of() {
    command -v apt-get >/dev/null 2>&1 || die "$2 is missing and there is no apt-get here: put it on PATH."
    say "$2 is missing: taking it from Debian's package $1"
    there=$(mktemp -d)
    chmod 755 "$there"
    if ! (cd "$there" && { apt-get -qq download "$1" || { [ "$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq download "$1"; }; } &&
        dpkg-deb -x ./*.deb files) 2>"$there/words"; then
        cat "$there/words" >&2
        rm -rf "$there"
        return 1
    fi
    cp "$there/files/usr/bin/$2" .venv/bin/
    rm -rf "$there"
}

find_python() {
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "there is no Python 3.11 or newer on PATH: install Debian's package python3, or name one with PYTHON=/path/to/python3."
}

# A .venv serves if its pip runs and belongs to this directory: a copied or moved checkout has one that does not.
venv_serves() {
    case "$(.venv/bin/python -m pip --version 2>/dev/null)" in
    *" from $here/.venv/"*) return 0 ;;
    *) return 1 ;;
    esac
}

make_venv() {
    python=$(find_python)
    # Debian has venv in its standard library, but not ensurepip, which puts pip into one.
    "$python" -c 'import ensurepip, venv' 2>/dev/null || system_package python3-venv "Python's venv with ensurepip"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python still cannot make a virtual environment: install ensurepip for it, or name another with PYTHON=/path/to/python3."
    say "making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
}

install_requirements() {
    say "installing requirements/dev.txt into .venv"
    # PIP_USER from an operator's configuration does not go with a virtual environment.
    PIP_USER=0 .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --require-hashes -r requirements/dev.txt
    PIP_USER=0 .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --no-deps --no-build-isolation --editable . --editable src/gpuactors_simulation
}

# What is installed follows from these files alone; the stamp is written last, so an interrupted set-up starts again.
wanted=$(cat do pyproject.toml src/gpuactors_simulation/pyproject.toml requirements/dev.txt | sha256sum)
if ! venv_serves; then
    make_venv
fi
if [ "$(cat .venv/stamp 2>/dev/null)" != "$wanted" ]; then
    install_requirements
    printf '%s\n' "$wanted" >.venv/stamp
fi

# pyudev loads it when it is imported; apt itself depends on it, so Debian has it, but not every image is Debian.
.venv/bin/python -c 'import pyudev' 2>/dev/null || system_package libudev1 "libudev.so.1"

# The tests render the manifests and the chart of deploy/ with kubectl and Helm. Where they cannot be had, the other tests still
# tell something: those of deploy/ fail and say why.
case "${1:-}" in
test) .venv/bin/python -m tests.deploy.tools || say "there are no Helm and kubectl: the tests of deploy/ will fail" ;;
esac

# They have systemd read the unit of deploy/systemd; nothing of it is started.
case "${1:-}" in
test) command -v systemd-analyze >/dev/null 2>&1 || (system_package systemd "systemd-analyze") || true ;;
esac

# Prometheus' own tool reads what the daemon serves, and its alerts; as above.
case "${1:-}" in
test)
    [ -x .venv/bin/promtool ] || command -v promtool >/dev/null 2>&1 || (program_of prometheus promtool) ||
        say "there is no promtool: the tests of the metrics will fail" ;;
esac

# How `./do node` ends is tested as root, with pytest on the folder of the real node; as above.
case "${1:-}" in
test)
    [ "$(id -u)" != 0 ] || ldconfig -p 2>/dev/null | grep -q 'libfuse3\.so\.3' || (system_package libfuse3-3 "libfuse3.so.3") || true ;;
esac

# The programs that the scripts of a kit of the real node use.
kit_programs() {
    for pair in xz:xz-utils openssl:openssl curl:curl ip:iproute2 sysctl:procps flock:util-linux nsenter:util-linux; do
        command -v "${pair%%:*}" >/dev/null 2>&1 || system_package "${pair#*:}" "${pair%%:*}"
    done
}

# libfuse3 serves the real node the host's sysfs. `scale` asks a real API server only for root and where there is a kit.
case "${1:-}" in
node | node-mutations | soak)
    ldconfig -p 2>/dev/null | grep -q 'libfuse3\.so\.3' || system_package libfuse3-3 "libfuse3.so.3"
    kit_programs
    ;;
scale)
    if [ "$(id -u)" = 0 ] && [ -e "${GPUACTORS_NODE_KIT:-../shared/node}/install.sh" ]; then kit_programs; fi
    ;;
esac

# The page of `gpuactors replay --html` is tested, and pictured, in a real browser; as above, the other tests tell something without it.
case "${1:-}" in
test | recording)
    for browser in chromium-headless-shell chromium chromium-browser google-chrome; do
        command -v "$browser" >/dev/null 2>&1 && break
    done || (system_package chromium-headless-shell "chromium, without a window") || true
    ;;
esac

export VIRTUAL_ENV="$here/.venv" PATH="$here/.venv/bin:$PATH"
exec just "$@"
