"""Standard modules of torch with masks, exported programs, and models with a cache: deployed and verified."""

import pytest
import torch
from torch import nn

from scalepoint import deploy
from scalepoint.errors import CaptureError, UsageError
from scalepoint.graph import capture
from scalepoint.graph.module_state import cache_disabled

pytestmark = pytest.mark.filterwarnings("ignore")


def deployed(model, inputs, folder, target="onnxruntime"):
    return deploy(
        model, inputs, [inputs], target=target, config={"speed_first": False}, output=folder, smoke=True, progress=False
    )


class Encoder(nn.Module):
    """`mask_source` says where its mask comes from."""

    def __init__(self, mask_source, **options):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options), 1)
        self.mask_source = mask_source
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(8))

    def forward(self, x, padding=None):
        if self.mask_source == "buffer":
            return self.encoder(x, mask=self.mask)
        if self.mask_source == "made":
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.encoder(x, mask=mask, is_causal=True)
        return self.encoder(x, src_key_padding_mask=padding)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(8))

    def forward(self, source, target):
        return self.both(source, target, tgt_mask=self.mask)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, 1)
        self.register_buffer("mask", torch.triu(torch.ones(8, 8, dtype=torch.bool), 1))

    def forward(self, target, memory):
        return self.decoder(target, memory, tgt_mask=self.mask)


def padding():
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[:, 6:] = True
    return mask


MASKED = {
    "a buffer": (lambda: Encoder("buffer"), 1),
    "made in forward": (lambda: Encoder("made", norm_first=True), 1),
    "padding": (lambda: Encoder("padding"), 2),
    "nn.Transformer": (Pair, 2),
    "nn.TransformerDecoder": (Decoder, 2),
}


@pytest.mark.parametrize(("make", "count"), MASKED.values(), ids=MASKED)
def test_encoders_and_decoders_with_masks_are_captured_as_their_layers(make, count):
    torch.manual_seed(0)
    model = make().eval()
    x = torch.randn(2, 8, 32)
    inputs = (x, padding() if isinstance(model, Encoder) else torch.randn(2, 8, 32))[:count]
    graph = capture(model, inputs)
    assert not any("_transformer_encoder_layer_fwd" in str(node.target) for node in graph.graph.nodes)
    with torch.no_grad():  # torch's fused kernel leaves zeros where tokens are padding; nothing reads those
        torch.testing.assert_close(graph(*inputs)[:, :6], model(*inputs)[:, :6], rtol=1e-4, atol=1e-5)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("name", ["a buffer", *(pytest.param(n, marks=pytest.mark.slow) for n in list(MASKED)[1:])])
def test_encoders_and_decoders_with_masks_are_quantized_and_verified(tmp_path, name):
    torch.manual_seed(0)
    make, count = MASKED[name]
    model = make().eval()
    inputs = (torch.randn(2, 8, 32), padding() if isinstance(model, Encoder) else torch.randn(2, 8, 32))[:count]
    done = deployed(model, inputs, tmp_path / "out")
    states = [str(row.state) for row in done.report.coverage.operations]
    assert states.count("quantized") >= 4
    assert done.verification.sqnr > 30


def test_an_exported_program_is_deployed_like_its_model(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1)).eval()
    x = torch.randn(2, 3, 8, 8)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    done = deployed(program, x, tmp_path / "out")
    assert [row.name for row in done.report.coverage.operations]
    assert {str(row.state) for row in done.report.coverage.operations} == {"quantized"}
    direct = deployed(model, x, tmp_path / "direct")
    with torch.no_grad():
        torch.testing.assert_close(done.model(x), direct.model(x))


def test_values_that_are_not_a_model_are_refused(tmp_path):
    with pytest.raises((CaptureError, UsageError)):
        deployed({"weight": torch.ones(2)}, torch.ones(2), tmp_path / "out")


def t5():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"d_model": 32, "num_layers": 1, "num_heads": 2, "d_kv": 16, "d_ff": 64, "vocab_size": 50}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    return transformers.T5Model(config).eval()


@pytest.mark.parametrize("set_by_user", [False, True], ids=["as loaded", "off in the outer config"])
def test_a_model_with_a_cache_is_captured_without_it(set_by_user):
    model = t5()
    if set_by_user:
        model.config.use_cache = False
    ids = torch.randint(0, 50, (2, 8))
    before = {name: module.config.use_cache for name, module in model.named_modules() if hasattr(module, "config")}
    graph = capture(model, {"input_ids": ids, "decoder_input_ids": ids})
    after = {name: module.config.use_cache for name, module in model.named_modules() if hasattr(module, "config")}
    assert before == after
    with torch.no_grad(), cache_disabled(model):
        expected = model(input_ids=ids, decoder_input_ids=ids).last_hidden_state
        output = graph(input_ids=ids, decoder_input_ids=ids)
    torch.testing.assert_close(output["last_hidden_state"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_t5_is_deployed_and_verified(tmp_path):
    ids = torch.randint(0, 50, (2, 8))
    done = deployed(t5(), {"input_ids": ids, "decoder_input_ids": ids}, tmp_path / "out")
    assert done.verification.sqnr > 30
