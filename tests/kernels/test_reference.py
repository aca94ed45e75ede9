"""The reference backend against the oracle."""

import pytest

from tagc.kernels import reference
from tests.kernels.contract import KernelContract


class TestReference(KernelContract):
    @pytest.fixture
    def backend(self):
        return reference
