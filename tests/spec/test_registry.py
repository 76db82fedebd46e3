"""Contract A4: each base class is a registry."""

import pytest

from scalepoint.errors import ScalepointError, UnknownKeyError
from scalepoint.spec import (
    FakeQuantizeImplBase,
    MinMaxRangeCalculator,
    QParamsCalculatorBase,
    QuantizationGranularity,
    RangeCalculatorBase,
)

BASES = [RangeCalculatorBase, QParamsCalculatorBase, FakeQuantizeImplBase, QuantizationGranularity]


@pytest.fixture
def scratch():
    yield RangeCalculatorBase
    RangeCalculatorBase._registry.pop("scratch", None)


@pytest.mark.parametrize("base", BASES)
def test_keys_and_values_are_listed_in_the_order_of_registration(base):
    keys = base.list_registry_keys()
    assert keys
    assert [base.get_class(key) for key in keys] == base.list_registry_values()
    assert [base.key_of(kind) for kind in base.list_registry_values()] == keys


def test_the_keys_of_the_contract_are_there():
    assert RangeCalculatorBase.list_registry_keys()[0] == "minmax"
    assert {"default", "static", "moving_average", "global_minmax"} <= set(QParamsCalculatorBase.list_registry_keys())
    assert "default" in FakeQuantizeImplBase.list_registry_keys()
    assert {"per_tensor", "per_channel", "per_block"} <= set(QuantizationGranularity.list_registry_keys())


def test_registering_returns_the_class_and_makes_it_known(scratch):
    class Mine(MinMaxRangeCalculator):
        pass

    assert scratch.register("scratch")(Mine) is Mine
    assert scratch.get_class("scratch") is Mine


def test_registering_a_key_again_warns_and_replaces(scratch):
    first, second = (type(name, (MinMaxRangeCalculator,), {}) for name in ("First", "Second"))
    scratch.register("scratch")(first)
    with pytest.warns(UserWarning, match="First.*Second"):
        scratch.register("scratch")(second)
    assert scratch.get_class("scratch") is second
    with pytest.raises(UnknownKeyError, match="First is not registered"):
        scratch.key_of(first)


@pytest.mark.parametrize("base", BASES)
def test_an_unknown_key_lists_the_known_ones(base):
    with pytest.raises(UnknownKeyError, match=base.list_registry_keys()[-1]) as caught:
        base.get_class("nonesuch")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, ScalepointError)


def test_a_class_of_another_family_is_refused_when_it_is_registered():
    with pytest.raises(ValueError, match="derive it from RangeCalculatorBase"):
        RangeCalculatorBase.register("scratch")(FakeQuantizeImplBase)


@pytest.mark.parametrize("key", ["", None, 3])
def test_a_key_is_a_name(key):
    with pytest.raises(ValueError, match="non-empty string"):
        RangeCalculatorBase.register(key)


def test_families_do_not_share_keys():
    with pytest.raises(UnknownKeyError):
        FakeQuantizeImplBase.get_class("minmax")
