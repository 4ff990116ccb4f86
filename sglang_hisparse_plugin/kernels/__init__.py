"""HiSparse's swap-in: the CUDA kernel, its typed op, and the same op in plain torch."""
