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
            shelf = ActivationStore(limit)
            shelf.put("a", value, quantizer)
            assert torch.equal(shelf.get("a"), value)
            assert shelf.held <= value.numel()
            shelf.drop("a")
            assert shelf.held == 0
            shelf.close()


def test_codes_keep_the_scale_that_they_were_made_with():
    quantizer = stub(False)
    value = quantizer(torch.randn(64))
    shelf = ActivationStore(10**6)
    shelf.put("a", value, quantizer)
    quantizer.scale.mul_(2)
    assert torch.equal(shelf.get("a"), value)


def test_a_value_that_is_put_again_counts_once():
    shelf = ActivationStore(10**6)
    for _ in range(3):
        shelf.put("a", torch.zeros(10))
    assert shelf.held == 40
