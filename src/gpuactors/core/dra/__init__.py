"""Dynamic Resource Allocation: claims, what is done for them, and the slices that offer the devices."""
