"""The numba backend against the contract."""

from __future__ import annotations

import pytest

from tagc.kernels import cpu
from tests.kernels.contract import KernelContract


class TestCpu(KernelContract):
    @pytest.fixture
    def backend(self):
        return cpu
