"""What the process of an in-process vLLM engine has to put up with."""

import pytest

from rllib_gigpo.engines.vllm.process import let_modules_be_scanned


def test_llvmlite_answers_no_dunder_names_and_all_others():
    ffi = pytest.importorskip("llvmlite.binding.ffi")
    let_modules_be_scanned()
    let_modules_be_scanned()
    assert not hasattr(ffi.lib, "__dict__")
    # A function of the library itself, which numba needs.
    assert callable(ffi.lib.LLVMPY_GetVersionInfo)
