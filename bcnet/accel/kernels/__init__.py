"""GPU kernels in Triton, with a plain PyTorch reference for each."""
