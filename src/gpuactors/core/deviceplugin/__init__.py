"""The device plugin API: device lists, registration, and the answers to calls."""
