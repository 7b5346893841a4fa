"""A daemon that advertises a node's passthrough GPUs to kubelet. Its packages and paths:
docs/architecture.md."""
