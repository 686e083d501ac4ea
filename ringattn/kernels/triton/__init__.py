"""The Triton backend: block kernels for NVIDIA and AMD GPUs, and, interpreted, for tests on any machine."""

from ringattn.kernels.triton.backend import Triton

__all__ = ["Triton"]
