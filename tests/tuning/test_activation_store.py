"""Stored values are restored bit for bit: from memory, from disk, and from codes."""

import torch

from scalepoint.quantize import QuantStub
from scalepoint.tuning.activation_store import ActivationStore


def stub(symmetric):
    quantizer = QuantStub(["layer"], symmetric=symmetric)
    quantizer.calibrating = True
    quantizer(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    quantizer.calibrating = False
    quantizer.compute_parameters()
    quantizer.enabled = True
    return quantizer


def test_outputs_of_a_quantizer_are_restored_from_one_byte_per_element():
    for symmetric in (True, False):
        quantizer = stub(symmetric)
        value = quantizer(torch.randn(64, 32) * 2)
        for limit in (10**6, 100):
            store = ActivationStore(limit)
            store.put("a", value, quantizer)
            assert torch.equal(store.get("a"), value)
            assert store.bytes_in_memory <= value.numel()
            store.drop("a")
            assert store.bytes_in_memory == 0
            store.close()


def test_codes_are_restored_with_the_scale_at_the_time_of_storing():
    quantizer = stub(False)
    value = quantizer(torch.randn(64))
    store = ActivationStore(10**6)
    store.put("a", value, quantizer)
    quantizer.scale.mul_(2)
    assert torch.equal(store.get("a"), value)


def test_a_value_that_is_stored_again_counts_once():
    store = ActivationStore(10**6)
    for _ in range(3):
        store.put("a", torch.zeros(10))
    assert store.bytes_in_memory == 40
