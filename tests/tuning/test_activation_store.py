"""Values come back bit for bit: from memory, from disk, and as codes."""

import torch

from scalepoint.quantize import QuantStub
from scalepoint.tuning.activation_store import ActivationStore


def stub(symmetric):
    made = QuantStub(["layer"], symmetric=symmetric)
    made.calibrating = True
    made(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    made.calibrating = False
    made.compute_parameters()
    made.enabled = True
    return made


def test_what_a_quantizer_gave_comes_back_from_a_byte_an_element():
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


def test_codes_keep_the_scale_that_they_were_made_with():
    quantizer = stub(False)
    value = quantizer(torch.randn(64))
    store = ActivationStore(10**6)
    store.put("a", value, quantizer)
    quantizer.scale.mul_(2)
    assert torch.equal(store.get("a"), value)


def test_a_value_that_is_put_again_counts_once():
    store = ActivationStore(10**6)
    for _ in range(3):
        store.put("a", torch.zeros(10))
    assert store.bytes_in_memory == 40
