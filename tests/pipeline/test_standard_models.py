"""Models as people write them: captured and deployed to ONNX Runtime, or refused with what to do."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scalepoint import deploy
from scalepoint.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore")


class Conformer(nn.Module):
    """One block: half a feed-forward, attention with padding, a convolution module."""

    def __init__(self, width=32):
        super().__init__()
        self.stem = nn.Conv1d(16, width, 3, 2, 1)
        self.feed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.SiLU(), nn.Linear(64, width))
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.wide, self.deep = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 7, padding=3, groups=width)
        self.bn, self.narrow, self.out = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1), nn.Linear(width, 20)

    def forward(self, mel, lengths):
        x = self.stem(mel).transpose(1, 2)
        x = x + 0.5 * self.feed(x)
        padding = torch.arange(x.shape[1])[None] >= ((lengths + 1) // 2)[:, None]
        y = self.norm(x)
        x = x + self.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        y = self.narrow(F.silu(self.bn(self.deep(F.glu(self.wide(x.transpose(1, 2)), 1)))))
        return self.out(x + y.transpose(1, 2)).log_softmax(-1)


class WithState(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.out = nn.GRU(16, 32, 2, batch_first=True), nn.Linear(32, 5)

    def forward(self, x, state):
        y, state = self.gru(x, state)
        return self.out(y), state


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.out = nn.GRU(16, 32, batch_first=True), nn.Linear(32, 5)

    def forward(self, x, lengths):
        rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.gru(rows)[1][-1])


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1))
        self.classes, self.boxes = nn.Conv2d(32, 6, 1), nn.Conv2d(32, 4, 1)

    def forward(self, x):
        y = self.stem(x).relu()
        scores, boxes = (head(y).flatten(2).transpose(1, 2) for head in (self.classes, self.boxes))
        return {"scores": scores.sigmoid(), "boxes": boxes}


def bart():
    transformers = pytest.importorskip("transformers")
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(vocab_size=50, d_model=32, max_position_embeddings=32, **layers, **heads)
    return transformers.BartModel(config)


def ids():
    return torch.randint(1, 50, (2, 8), generator=torch.Generator().manual_seed(0))


CASES = {
    "conformer": (Conformer, lambda: (torch.randn(2, 16, 32), torch.tensor([32, 20]))),
    "gru with a state": (WithState, lambda: (torch.randn(2, 6, 16), torch.zeros(2, 2, 32))),
    "detector": (Detector, lambda: (torch.randn(2, 3, 32, 32),)),
    "bart with its cache": (bart, lambda: {"input_ids": ids(), "decoder_input_ids": ids()}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "example"), CASES.values(), ids=CASES)
def test_the_file_of_a_standard_model_agrees_with_the_simulation(tmp_path, make, example):
    torch.manual_seed(0)
    model, inputs = make().eval(), example()
    done = deploy(
        model, inputs, [inputs], config={"speed_first": False}, output=tmp_path / "out", smoke=True, progress=False
    )
    assert "quantized" in {str(row.state) for row in done.report.coverage.operations}
    assert done.verification.sqnr > 30


def test_packed_sequences_are_refused_with_a_hint(tmp_path):
    inputs = (torch.randn(2, 6, 16), torch.tensor([6, 4]))
    with pytest.raises(CaptureError, match=r"Packed sequences.*padded tensor"):
        deploy(Packed().eval(), inputs, [inputs], output=tmp_path / "out", smoke=True, progress=False)
