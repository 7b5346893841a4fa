"""A fake disk: it stops at any operation, and loses what was not synced."""
