"""The vGPU facts of a virtual function: what NVIDIA's driver says of it (vendor VFIO, vGPU 17 and newer).

A file of its own: the functions of the host, the memory of names and the kind have it.
"""

from __future__ import annotations

from msgspec import Struct


class VendorVgpu(Struct, frozen=True, gc=False):
    """The attributes in the directory `nvidia/` of a virtual function, as an inspection read them."""

    type: int | None
    """The number of the vGPU type that the function has, 0 for none; None if it could not be read. The number means a
    type of one physical card only."""
    creatable: tuple[tuple[int, str], ...] = ()
    """The types that could be set now, by number, each with its name: `(1147, "NVIDIA L40S-1Q")`. Empty once the card
    is full."""
    unlisted: str = ""
    """The part of the list of types that could not be read, as a sentence; empty if all could."""
    driver_bind: int = 0
    """The inode number of the link `driver` of the physical function, which the kernel never reuses (fs/kernfs,
    kernfs_ino): it changes when a driver is bound anew. 0 if unknown."""

    @property
    def is_typed(self) -> bool:
        """True if the function has a vGPU type."""
        return bool(self.type)
