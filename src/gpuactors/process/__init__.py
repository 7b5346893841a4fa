"""What this process has to settle with its operating system: memory, signals, exhausted resources, files in directories
of others. Must import nothing of ours."""
