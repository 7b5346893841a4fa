"""The kinds of devices: which devices there are, why a virtual machine could not open one, and how one is allocated.

Only the module of a device's kind reads the facts of its units; all other modules read `values/inventory.py`.
"""
