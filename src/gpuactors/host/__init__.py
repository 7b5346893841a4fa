"""Adaptors to the kernel: sysfs, device nodes, uevents, and the names of PCI ids.

They turn what the host shows into the core's values. Must not decide what a fact means, and must not open a device.
"""
