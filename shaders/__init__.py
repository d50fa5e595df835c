"""Ternary kernels: the contract (``kernels.json``), WGSL, the NumPy reference and the native GPU executor."""
