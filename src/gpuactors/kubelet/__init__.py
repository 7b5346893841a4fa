"""Adaptor to kubelet: its device plugin API over unix sockets."""
