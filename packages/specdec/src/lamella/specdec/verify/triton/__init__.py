"""Verification as Triton kernels, for tensors on a GPU: arguments and results are those of the torch functions."""
