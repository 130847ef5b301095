"""Triton's interpreter (TRITON_INTERPRET=1), taught what Liger's kernels need and it lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter


@triton.jit
def rsqrt(x):
    return 1.0 / tl.sqrt(x)


def prepare() -> None:
    """Pass floats as fp32 scalars, as the compiler does, and give norms an `rsqrt` without CUDA."""
    from liger_kernel.ops import rms_norm

    convert = interpreter._implicit_cvt

    def as_compiled(argument: Any) -> Any:
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = as_compiled
    rms_norm.rsqrt = rsqrt
