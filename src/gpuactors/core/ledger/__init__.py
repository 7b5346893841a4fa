"""Kubelet's ledger: which pod has which device, and when it is read."""
