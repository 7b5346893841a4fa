"""What the daemon leaves for those who look at it: the log, the journal, metrics, the feature file for NFD."""
