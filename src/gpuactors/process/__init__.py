"""The process and its operating system: memory, signals, exhausted resources, files in directories of others. Must
import no other package of gpuactors."""
