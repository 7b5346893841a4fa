"""Partitions of an NVLink fabric that gpuactors activates for their owners, and deactivates after them (ADR 0025)."""
