"""The daemon's adaptors in memory: no socket, no thread and no clock of their own, for runs on trio's mock clock."""
