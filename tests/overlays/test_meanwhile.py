"""What SGLang's objects are given while their own code runs is gone afterwards, whatever happened."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_hisparse_plugin.overlays.meanwhile import meanwhile


class Pool:
    def alloc(self) -> str:
        return "the class's"


def test_an_attribute_of_the_class_shows_again() -> None:
    pool = Pool()
    with meanwhile(pool, alloc=lambda: "ours"):
        assert pool.alloc() == "ours"
    assert pool.alloc() == "the class's" and not vars(pool)


def test_an_attribute_of_its_own_comes_back_after_an_error() -> None:
    module = SimpleNamespace(torch="theirs")
    with pytest.raises(RuntimeError), meanwhile(module, torch="ours"), meanwhile(module, torch="twice"):
        assert module.torch == "twice"
        raise RuntimeError
    assert vars(module) == {"torch": "theirs"}
