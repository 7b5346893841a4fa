"""A daemon that advertises a node's passthrough GPUs to kubelet. Its packages, paths and glossary:
docs/architecture.md."""
