"""Names of arguments that changed, and packages that are absent."""

from __future__ import annotations

from importlib import import_module

import pytest
from transformers import LlamaModel

from specdist.utils.errors import UserError
from specdist.utils.packages import cache_argument, named_packages


def test_the_cache_has_the_name_that_the_installed_model_takes() -> None:
    def newer(self: object, cache: object = None, **kwargs: object) -> None: ...
    def older(self: object, past_key_values: object = None, **kwargs: object) -> None: ...

    def of_states(self: object, cache_params: object = None, **kwargs: object) -> None: ...

    names = [cache_argument(each) for each in (newer, older, of_states)]
    assert names == ["cache", "past_key_values", "cache_params"]
    # Any other is taken for one of the arguments that it hands on, and ignored.
    assert cache_argument(LlamaModel.forward) in LlamaModel.forward.__annotations__


def test_only_a_package_that_is_absent_is_named() -> None:
    named = r"plots needs the package absent_package, .* pip install absent_package"
    with pytest.raises(UserError, match=named), named_packages("plots"):
        import_module("absent_package.part")
    # Faults in what is there are told as they are.
    for module in ("specdist.absent", "json.absent"):
        with pytest.raises(ModuleNotFoundError, match=module), named_packages("plots"):
            import_module(module)
