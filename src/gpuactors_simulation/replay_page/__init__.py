"""The page of `gpuactors replay --html`: the timeline of every device. It takes what `gpuactors.replay` has played."""
