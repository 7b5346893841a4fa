"""`python -m gpuactors`."""

from gpuactors.cli import main

if __name__ == "__main__":
    main()
