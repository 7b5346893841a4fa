"""The daemon's outside in memory: no socket, no thread and no clock of its own, for runs on trio's mock clock."""
