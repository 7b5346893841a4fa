"""The kinds of devices: what is there of each, why a virtual machine could not open one, and how it is given away.

A device answers for itself (`values/inventory.py`); only the module of its kind reads the facts of its units.
"""
