"""A daemon that tells kubelet which passthrough GPUs a node has. Its rooms, paths and words: docs/architecture.md."""
