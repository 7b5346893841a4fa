"""The views for readers outside the core, read off the state."""
