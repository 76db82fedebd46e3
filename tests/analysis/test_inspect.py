"""inspect: the coverage before any data, the same that insert_qdq gives."""

import pytest
import torch
from torch import nn

from scalepoint.analysis import inspect
from scalepoint.errors import ConfigError, ScalepointError, ScalepointWarning, TargetError
from scalepoint.quantize import Override, QuantConfig, TensorQuantConfig, insert_qdq, record_of
from scalepoint.transformation import transform
from tests.analysis.nets import batches, float_net, quantized_net, same, snapshot, some_models
from tests.models import with_norm_statistics

LEFT_FLOAT = QuantConfig(activation="float", weight="float")


@pytest.mark.parametrize(("make", "inputs", "target"), some_models())
def test_inspect_predicts_insert_qdq_and_leaves_the_model_unchanged(make, inputs, target):
    torch.manual_seed(0)
    plain = with_norm_statistics(make()).train()
    before, owners = snapshot(plain), [id(parameter) for parameter in plain.parameters()]
    coverage = inspect(plain, inputs, target=target)
    same(before, snapshot(plain))
    assert owners == [id(parameter) for parameter in plain.parameters()]
    result = transform(plain, inputs, target=target)
    assert coverage == record_of(insert_qdq(result.model, result.matches)).coverage


def test_the_config_is_used():
    config = QuantConfig(overrides=(Override(name="fifth", activation="float", weight="float"),))
    result = inspect(float_net(), batches()[0], config=config)
    assert {row.name: row.state.value for row in result.operations}["fifth"] == "float"
    assert inspect(float_net(), batches()[0], config=config.to_dict()) == result


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (nn.ReLU(), None, "it has no weights"),
        (nn.LSTM(6, 4, batch_first=True), None, "lstm"),
        (nn.Sequential(nn.Linear(6, 4)), LEFT_FLOAT, "by the config"),
        (nn.Sequential(nn.Linear(6, 4)), LEFT_FLOAT.to_dict(), "by the config"),
    ],
    ids=["relu", "lstm", "config", "mapping"],
)
def test_nothing_to_quantize_is_a_warning(model, config, message):
    with pytest.warns(ScalepointWarning, match=f"nothing.*{message}"):
        result = inspect(model.eval(), torch.randn(2, 3, 6), config=config)
    assert not result.in_state("quantized")
    assert all(row.reason for row in result.operations)


def test_without_example_inputs_macs_are_unknown():
    result = inspect(float_net())
    assert len(result.in_state("quantized")) == 5
    assert result.share_of_macs() is None


def test_inputs_by_name():
    assert inspect(float_net(), kwargs={"x": batches()[0]}) == inspect(float_net(), batches()[0])


def test_a_quantized_model_returns_its_coverage():
    model = quantized_net()
    assert inspect(model) == record_of(model).coverage


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": "onnxruntim"}, ScalepointError, "onnxruntime"),
        ({"config": QuantConfig(weight=TensorQuantConfig(n_bits=2))}, TargetError, "cannot run"),
        ({"config": {"wieght": "float"}}, ValueError, "did you mean 'weight'"),
        (
            {"config": QuantConfig(overrides=(Override(name="nobody", weight="float"),))},
            ConfigError,
            "matches no operation",
        ),
    ],
    ids=["target", "illegal", "misspelt", "unmatched"],
)
def test_bad_input(options, error, message):
    with pytest.raises(error, match=message):
        inspect(float_net(), batches()[0], **options)
