"""A fake host: its tree of PCI devices, the uevents that it sends, and the processes that have its groups open."""
