"""What a container without capabilities is refused by seccomp under RuntimeDefault.

The runtimes' own profiles are lists of what is allowed; what comes out of them for x86-64 is given here the other way
round, after Docker's list of what its profile blocks (docs.docker.com/engine/security/seccomp, "Significant syscalls
blocked by the default profile"; containerd's contrib/seccomp follows the same). The filter is made by libseccomp, which
every Debian has because apt needs it. Must not import anything of ours.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Collection
from typing import Final

_REFUSED: Final = """
    mount umount2 pivot_root chroot setns unshare fsopen fsconfig fsmount fspick move_mount open_tree mount_setattr
    sethostname setdomainname
    init_module finit_module delete_module create_module query_module get_kernel_syms kexec_load kexec_file_load
    reboot swapon swapoff acct quotactl quotactl_fd nfsservctl syslog vhangup ustat sysfs _sysctl uselib
    clock_settime clock_adjtime settimeofday
    bpf perf_event_open lookup_dcookie fanotify_init userfaultfd kcmp ptrace process_vm_readv process_vm_writev
    process_madvise pidfd_getfd
    add_key keyctl request_key
    get_mempolicy set_mempolicy mbind move_pages migrate_pages set_mempolicy_home_node
    ioperm iopl modify_ldt
    name_to_handle_at open_by_handle_at
    io_uring_setup io_uring_enter io_uring_register
"""

GRANTED_WITH: Final = {
    "SYS_PTRACE": (
        "kcmp",
        "ptrace",
        "process_vm_readv",
        "process_vm_writev",
        "process_madvise",
        "pidfd_getfd",
    ),
    "DAC_READ_SEARCH": ("name_to_handle_at", "open_by_handle_at"),
    "SYS_CHROOT": ("chroot",),
    "SYS_MODULE": ("init_module", "finit_module", "delete_module", "query_module"),
}
"""What the profiles let through for whoever has the capability."""

_NEW_NAMESPACES: Final = (0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x00020000)
"""clone(2): CLONE_NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWNS."""

_AF_VSOCK: Final = 40
_ALLOW: Final = 0x7FFF0000
_MASKED_EQUAL: Final = 7
_EQUAL: Final = 4


class _Comparison(ctypes.Structure):
    """struct scmp_arg_cmp, seccomp.h."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


def loaded() -> ctypes.CDLL:
    """libseccomp, loaded before the root is the image's, which has none. Raises OSError where it is missing."""
    return ctypes.CDLL("libseccomp.so.2")


def load_runtime_default(library: ctypes.CDLL, capabilities: Collection[str]) -> None:
    """Put this process, and whatever it becomes, under the filter. Raises OSError."""
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    granted = {name for capability in capabilities for name in GRANTED_WITH.get(capability, ())}

    def refuse(name: str, error: int, *comparisons: _Comparison) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # this libseccomp does not know it, or this architecture does not have it
            return
        given = (_Comparison * len(comparisons))(*comparisons)
        action = ctypes.c_uint32(0x00050000 | error)
        _check(library.seccomp_rule_add_array(context, action, number, len(comparisons), given), name)

    for name in _REFUSED.split():
        if name not in granted:
            refuse(name, errno.EPERM)
    for flag in _NEW_NAMESPACES:
        refuse("clone", errno.EPERM, _Comparison(0, _MASKED_EQUAL, flag, flag))
    # Its flags are behind a pointer, which no filter can follow: the C library falls back to clone.
    refuse("clone3", errno.ENOSYS)
    refuse("socket", errno.EPERM, _Comparison(0, _EQUAL, _AF_VSOCK, 0))
    _check(library.seccomp_load(context), "seccomp_load")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(-result, f"libseccomp: {what}")
