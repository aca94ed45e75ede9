"""Backends by name: what ``auto`` takes, and what cannot run says why."""

from __future__ import annotations

import inspect
import sys

import pytest

from tagc.errors import UserError
from tagc.kernels import BACKENDS, Backend, reference, resolve_backend


def test_auto_takes_the_compiled_backend_on_a_cpu():
    name, module = resolve_backend("auto")
    assert name == "cpu"
    assert module.__name__ == "tagc.kernels.cpu"


def test_auto_passes_over_what_is_not_installed(monkeypatch):
    monkeypatch.setitem(BACKENDS, "cpu", Backend("tagc.kernels.not_there", ("cpu",)))
    assert resolve_backend("auto") == ("reference", reference)


def test_a_backend_asked_for_by_name_is_never_replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "tagc.kernels.cpu", None)  # as if numba could not be imported
    with pytest.raises(UserError, match=r"kernels=cpu cannot run here.*kernels=reference"):
        resolve_backend("cpu")


def test_a_backend_of_another_device_is_refused():
    with pytest.raises(UserError, match="kernels=cpu works on cpu, not on cuda"):
        resolve_backend("cpu", "cuda")
    assert resolve_backend("auto", "cuda")[0] != "cpu"


def test_an_unknown_name_lists_the_backends():
    with pytest.raises(UserError, match="choose auto or reference, cpu"):
        resolve_backend("fast")


def test_no_place_for_compiled_code_names_the_remedy(monkeypatch):
    def refuse(module):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr("tagc.kernels.import_module", refuse)
    with pytest.raises(UserError, match="NUMBA_CACHE_DIR"):
        resolve_backend("auto")


CONTRACT = [name for name in reference.__all__ if not name[0].isupper()]


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "reference"])
def test_every_backend_has_the_contract_with_the_same_signatures(name):
    """Names, order, kinds, defaults and types of all arguments, and of what is returned."""
    module = resolve_backend(name, BACKENDS[name].devices[0])[1]
    assert set(CONTRACT) <= set(module.__all__)
    for operation in CONTRACT:
        assert inspect.signature(getattr(module, operation)) == inspect.signature(getattr(reference, operation))
