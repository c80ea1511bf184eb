"""The C++ kernels for the CPU, without torch headers, and the file that loads what was built."""
