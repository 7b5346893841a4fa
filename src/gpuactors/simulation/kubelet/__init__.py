"""A fake kubelet: its bookkeeping, its plugins and pods, its directory on a disk or in memory."""
