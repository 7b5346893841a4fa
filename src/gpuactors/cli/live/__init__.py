"""`gpuactors inspect --watch`: the running daemon's view as it changes, on a terminal or as a stream of lines."""
