"""The process and its operating system: memory, signals, exhausted resources, files in directories of others; what the
start need not import. Must import no other package of gpuactors."""
