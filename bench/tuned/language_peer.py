"""Runs in an environment of its own, where another tool is installed; knows nothing of scalepoint.

python language_peer.py HOW FOLDER TOKENS BITS OUTPUT

TOKENS are safetensors of `calibration`, a text a row; OUTPUT is what the codes of every linear layer stand for, and the
`seconds` of the CPU that quantizing took.
"""

import sys
import time
from collections.abc import Callable

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

GROUP = 64


def auto_round(model: nn.Module, tokens: Tensor, bits: int, tokenizer: object) -> nn.Module:
    """Fifty iterations, as its light recipe has them; groups around zero; in float32, as not every CPU is quick in
    bfloat16."""
    from auto_round import AutoRound  # noqa: PLC0415

    tool = AutoRound(
        model, tokenizer, scheme=f"W{bits}A16", bits=bits, group_size=GROUP, sym=True, iters=50, lr=5e-3,
        seqlen=tokens.shape[1], nsamples=len(tokens), batch_size=8, enable_torch_compile=False, device_map="cpu",
        dataset=[{"input_ids": row[None]} for row in tokens], amp=False,
    )  # fmt: skip
    made, _ = tool.quantize()
    return made


def nncf(model: nn.Module, tokens: Tensor, bits: int, tokenizer: object) -> nn.Module:
    """AWQ and scale estimation, its recipe for accuracy."""
    import nncf as tool  # noqa: PLC0415

    made: nn.Module = tool.compress_weights(
        model, mode=tool.CompressWeightsMode.INT4_SYM, group_size=GROUP, ratio=1.0, awq=True, scale_estimation=True,
        dataset=tool.Dataset([{"input_ids": row[None]} for row in tokens]), subset_size=len(tokens),
        ignored_scope=tool.IgnoredScope(patterns=[".*embed.*", ".*lm_head.*"]),
    )  # fmt: skip
    return made


def stands_for(made: nn.Module, name: str) -> Tensor:
    """The weight of a layer as floats: NNCF keeps packed codes, and a module that unpacks them."""
    weight, place = made.get_submodule(name).weight, f"{name.replace('.', ':')}:weight"
    for found, each in made.named_modules():
        if place in found and type(each).__name__.endswith("Decompressor"):
            weight = each(weight)
    return weight.detach().float().contiguous()


def is_all(made: nn.Module, weights: dict[str, Tensor], folder: str, tokens: Tensor) -> bool:
    """Whether the weights are all that the tool changed: with them the model computes what the tool's does."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, weight in weights.items():
        plain.get_submodule(name).weight.data.copy_(weight)
    with torch.no_grad():
        found, wanted = (model(tokens[:1]).logits.float() for model in (plain, made))
    return bool((found - wanted).norm() <= 1e-3 * wanted.norm())


WAYS: dict[str, Callable[[nn.Module, Tensor, int, object], nn.Module]] = {"auto-round": auto_round, "nncf": nncf}


def main() -> None:
    how, folder, data, bits, output = sys.argv[1:6]
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    names = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and "head" not in name]
    tokens, start = load_file(data)["calibration"], time.process_time()
    made = WAYS[how](model, tokens, int(bits), tokenizer)
    seconds = torch.tensor(time.process_time() - start)
    found = {name: stands_for(made, name) for name in names}
    if not is_all(made, found, folder, tokens):
        sys.exit(f"{how} changed more than the weights of the linear layers")
    save_file({"seconds": seconds, **found}, output)


if __name__ == "__main__":
    main()
