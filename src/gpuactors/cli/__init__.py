"""The command line. `commands.py` parses it and imports what one command needs only when that command runs; `start.py`
starts the daemon."""
