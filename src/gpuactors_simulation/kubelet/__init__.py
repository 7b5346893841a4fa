"""A fake kubelet: its device manager, its plugins and pods, its directory on a disk or in memory."""
