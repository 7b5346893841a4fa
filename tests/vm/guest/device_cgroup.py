"""A container's cgroup: which device nodes it may open, and how much memory it may use.

The list of devices is the runtime's own (opencontainers/runc, libcontainer/specconv, AllowedDevices). In cgroup v2 it
is a small BPF program (linux/bpf.h, BPF_PROG_TYPE_CGROUP_DEVICE), written out here. Must not import anything of ours.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Final

ALLOWED: Final = ((1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2), (136, None))
"""Character devices: null, zero, full, random, urandom, tty, ptmx, and every pseudo terminal."""

_BPF_SYSCALL: Final = 321  # x86-64
_PROG_LOAD, _PROG_ATTACH = 5, 8
_CGROUP_DEVICE_PROGRAM: Final = 15
_CGROUP_DEVICE_ATTACH: Final = 6

_CHARACTER: Final = 2
_MKNOD_ALONE: Final = 1
"""Access bits, above the 16 bits of the type. Making any node is let through: that is for CAP_MKNOD to refuse."""


def enter(directory: Path, *, memory_bytes: int, devices: bool) -> None:
    """Make the cgroup at `directory`, in a mounted cgroup2, and move this process there. Raises OSError."""
    (directory.parent / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
    directory.mkdir(exist_ok=True)
    (directory / "memory.max").write_text(str(memory_bytes), encoding="ascii")
    if devices:
        _attach(directory, _program())
    (directory / "cgroup.procs").write_text("0", encoding="ascii")


def _program() -> bytes:
    """Loads the three words of struct bpf_cgroup_dev_ctx, compares, and returns 1 to allow or 0 to refuse."""
    load, shift, mask, move, jump_equal, jump_not, set_to, leave = (
        0x61, 0x77, 0x57, 0xBF, 0x15, 0x55, 0xB7, 0x95,
    )  # fmt: skip
    allow, refuse = "allow", "refuse"
    lines: list[tuple[int, int, int, int | str, int]] = [
        (load, 2, 1, 0, 0), (load, 3, 1, 4, 0), (load, 4, 1, 8, 0),  # r2 access and type, r3 major, r4 minor
        (move, 5, 2, 0, 0), (shift, 5, 0, 0, 16), (jump_equal, 5, 0, allow, _MKNOD_ALONE),
        (mask, 2, 0, 0, 0xFFFF), (jump_not, 2, 0, refuse, _CHARACTER),
    ]  # fmt: skip
    for major, minor in ALLOWED:
        if minor is None:
            lines.append((jump_equal, 3, 0, allow, major))
        else:
            lines += [(jump_not, 3, 0, 1, major), (jump_equal, 4, 0, allow, minor)]
    labels = {refuse: len(lines), allow: len(lines) + 2}
    lines += [(set_to, 0, 0, 0, 0), (leave, 0, 0, 0, 0), (set_to, 0, 0, 0, 1), (leave, 0, 0, 0, 0)]
    return b"".join(
        struct.pack(
            "<BBhi", code, to | source << 4, labels[at] - here - 1 if isinstance(at, str) else at, value
        )
        for here, (code, to, source, at, value) in enumerate(lines)
    )


def _attach(directory: Path, program: bytes) -> None:
    code, licence = ctypes.create_string_buffer(program), ctypes.create_string_buffer(b"Apache-2.0")
    loaded = _bpf(
        _PROG_LOAD,
        struct.pack(
            "<IIQQ",
            _CGROUP_DEVICE_PROGRAM,
            len(program) // 8,
            ctypes.addressof(code),
            ctypes.addressof(licence),
        ),
    )
    cgroup = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _bpf(_PROG_ATTACH, struct.pack("<IIII", cgroup, loaded, _CGROUP_DEVICE_ATTACH, 0))
    os.close(cgroup)
    os.close(loaded)


def _bpf(command: int, attributes: bytes) -> int:
    # The kernel takes what is missing of its union for zero.
    buffer = ctypes.create_string_buffer(attributes.ljust(128, b"\0"), 128)
    result: int = ctypes.CDLL(None, use_errno=True).syscall(_BPF_SYSCALL, command, buffer, len(buffer))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"bpf command {command}: {os.strerror(number)}")
    return result
