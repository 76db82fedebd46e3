"""Models in plain torch with the structure and names of well-known models. Narrow ones run in milliseconds."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """The block of torchvision: convolutions 1x1, 3x3, 1x1; the input is added before the last ReLU."""

    expansion = 4

    def __init__(self, inplanes: int, planes: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, planes * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A ResNet with the names of torchvision. The original width is 64."""

    def __init__(self, layers: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.inplanes = width
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._layer(width, layers[0], 1)
        self.layer2 = self._layer(width * 2, layers[1], 2)
        self.layer3 = self._layer(width * 4, layers[2], 2)
        self.layer4 = self._layer(width * 8, layers[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(width * 8 * Bottleneck.expansion, classes)

    def _layer(self, planes: int, blocks: int, stride: int) -> nn.Sequential:
        wide = planes * Bottleneck.expansion
        downsample = None
        if stride != 1 or self.inplanes != wide:
            downsample = nn.Sequential(nn.Conv2d(self.inplanes, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))
        first = Bottleneck(self.inplanes, planes, stride, downsample)
        self.inplanes = wide
        return nn.Sequential(first, *(Bottleneck(wide, planes) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet50(width: int = 64, classes: int = 1000) -> ResNet:
    return ResNet((3, 4, 6, 3), width, classes)


class MLPBlock(nn.Sequential):
    def __init__(self, hidden: int, mlp: int, dropout: float) -> None:
        super().__init__(
            nn.Linear(hidden, mlp), nn.GELU(), nn.Dropout(dropout), nn.Linear(mlp, hidden), nn.Dropout(dropout)
        )


class EncoderBlock(nn.Module):
    def __init__(self, heads: int, hidden: int, mlp: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(hidden, heads, dropout=dropout, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.ln_2 = nn.LayerNorm(hidden, eps=1e-6)
        self.mlp = MLPBlock(hidden, mlp, dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.ln_1(tokens)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = self.dropout(x) + tokens
        return x + self.mlp(self.ln_2(x))


class Encoder(nn.Module):
    def __init__(self, length: int, depth: int, heads: int, hidden: int, mlp: int, dropout: float) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, length, hidden).normal_(std=0.02))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential()
        for index in range(depth):
            self.layers.add_module(f"encoder_layer_{index}", EncoderBlock(heads, hidden, mlp, dropout))
        self.ln = nn.LayerNorm(hidden, eps=1e-6)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.ln(self.layers(self.dropout(tokens + self.pos_embedding)))


class VisionTransformer(nn.Module):
    """A vision transformer with the names of torchvision.

    ViT-B/16 has hidden 768, 12 heads, mlp 3072, image 224 and patch 16.
    """

    def __init__(
        self,
        hidden: int = 768,
        heads: int = 12,
        depth: int = 12,
        image: int = 224,
        patch: int = 16,
        classes: int = 1000,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.hidden = hidden
        self.conv_proj = nn.Conv2d(3, hidden, patch, patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, hidden) * 0.02)
        length = (image // patch) ** 2 + 1
        self.encoder = Encoder(length, depth, heads, hidden, hidden * 4, dropout)
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(hidden, classes))

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        x = self.conv_proj(x).reshape(batch, self.hidden, -1).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(batch, -1, -1), x], dim=1)
        return self.heads(self.encoder(x)[:, 0])


def vit_b16(hidden: int = 768, image: int = 224, classes: int = 1000, dropout: float = 0.0) -> VisionTransformer:
    """ViT-B/16 with its twelve blocks and heads, of any width that is a multiple of twelve."""
    return VisionTransformer(hidden, 12, 12, image, 16, classes, dropout)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class GroupedQueryAttention(nn.Module):
    """Causal attention with rotary positions, and fewer heads for keys and values than for queries."""

    inverse_frequency: Tensor

    def __init__(self, hidden: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, hidden // heads
        self.q_proj = nn.Linear(hidden, heads * self.size, bias=False)
        self.k_proj = nn.Linear(hidden, groups * self.size, bias=False)
        self.v_proj = nn.Linear(hidden, groups * self.size, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        frequencies = 1.0 / (10000.0 ** (torch.arange(0, self.size, 2) / self.size))
        self.register_buffer("inverse_frequency", frequencies, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        angles = torch.outer(torch.arange(length, device=x.device), self.inverse_frequency)
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        q = self.q_proj(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeats = self.heads // self.groups
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, hidden))


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, groups: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden, eps=1e-6)
        self.self_attn = GroupedQueryAttention(hidden, heads, groups)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=1e-6)
        self.mlp = GatedMLP(hidden, hidden * 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """A small language model: rotary grouped-query attention, gated MLP, RMS norm, head tied to the embedding."""

    def __init__(
        self, vocabulary: int = 50, hidden: int = 32, layers: int = 2, heads: int = 4, groups: int = 2
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(DecoderLayer(hidden, heads, groups) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class DoubleConv(nn.Sequential):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(
            nn.Conv2d(inner, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """A U-Net: down, up with transposed convolutions, and a concatenation across at every level."""

    def __init__(self, width: int = 4, classes: int = 2) -> None:
        super().__init__()
        self.inc = DoubleConv(3, width)
        self.down1 = DoubleConv(width, width * 2)
        self.down2 = DoubleConv(width * 2, width * 4)
        self.pool = nn.MaxPool2d(2)
        self.up1 = nn.ConvTranspose2d(width * 4, width * 2, 2, stride=2)
        self.conv1 = DoubleConv(width * 4, width * 2)
        self.up2 = nn.ConvTranspose2d(width * 2, width, 2, stride=2)
        self.conv2 = DoubleConv(width * 2, width)
        self.outc = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.inc(x)
        second = self.down1(self.pool(first))
        third = self.down2(self.pool(second))
        x = self.conv1(torch.cat([second, self.up1(third)], dim=1))
        x = self.conv2(torch.cat([first, self.up2(x)], dim=1))
        return self.outc(x)


class SilentSkip(nn.Module):
    """Layers that tools miss if they only look for nn.Linear: a functional linear, packed attention, an LSTM."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, hidden) * 0.3)
        self.attention = nn.MultiheadAttention(hidden, 2, batch_first=True)
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight)
        x, _ = self.attention(x, x, x, need_weights=False)
        x, _ = self.lstm(x)
        return self.head(x[:, -1])


def with_norm_statistics(model: nn.Module) -> nn.Module:
    """Set batch norm statistics and affine parameters as after training, so that a lost one changes the output."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.2, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
            nn.init.uniform_(module.weight, 0.5, 1.5, generator=generator)
            nn.init.normal_(module.bias, 0, 0.2, generator=generator)
    return model.eval()
