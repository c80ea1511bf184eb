"""GPU kernels in Triton. Nothing here imports triton before a kernel is needed."""
