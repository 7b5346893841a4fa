"""Adaptors to the kernel: sysfs, device nodes, uevents, and the names of PCI ids.

They convert the host's files and messages into the core's values. Must not decide the meaning of a fact, and must not
open a device.
"""
