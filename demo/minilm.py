"""all-MiniLM-L6-v2 in plain torch: a BERT encoder of 6 layers, with the names of its published weights."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, INNER = 384, 12, 6, 1536


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dense, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return self.norm(self.dense(y) + x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention(x, mask)
        return self.norm(self.down(F.gelu(self.up(x))) + x)


class MiniLM(nn.Module):
    """Tokens in, one vector of length 1 a sentence out: the mean of its token vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.types = (nn.Embedding(size, WIDTH) for size in (30522, 512, 2))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.norm(self.words(input_ids) + self.positions(positions) + self.types(torch.zeros_like(input_ids)))
        mask = attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, mask)
        weight = attention_mask.unsqueeze(-1).to(x.dtype)
        return F.normalize((x * weight).sum(1) / weight.sum(1), dim=-1)


def names() -> dict[str, str]:
    """Our name of each module -> its published one."""
    their_names = {
        "words": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "types": "embeddings.token_type_embeddings",
        "norm": "embeddings.LayerNorm",
    }
    for index in range(LAYERS):
        theirs = f"encoder.layer.{index}"
        parts = {part: f"attention.self.{part}" for part in ("query", "key", "value")}
        parts |= {"dense": "attention.output.dense", "norm": "attention.output.LayerNorm"}
        their_names |= {
            f"layers.{index}.attention.{our_name}": f"{theirs}.{other}" for our_name, other in parts.items()
        }
        rest = {"up": "intermediate.dense", "down": "output.dense", "norm": "output.LayerNorm"}
        their_names |= {f"layers.{index}.{our_name}": f"{theirs}.{other}" for our_name, other in rest.items()}
    return their_names


def loaded(tensors: dict[str, Tensor]) -> MiniLM:
    model = MiniLM()
    known = names()
    state = {
        name: tensors[f"{known[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}"] for name in model.state_dict()
    }
    model.load_state_dict(state)
    return model.eval()
