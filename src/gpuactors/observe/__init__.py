"""The daemon's records for its observers: the log, the journal, metrics, the feature file for NFD."""
