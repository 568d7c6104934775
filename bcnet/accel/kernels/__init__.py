"""GPU kernels in Triton, and the functions that launch them."""
