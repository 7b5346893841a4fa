"""What readers outside the core get, read off the state."""
