"""The devices of this node: from functions to groups and devices, under the IDs that kubelet uses."""
