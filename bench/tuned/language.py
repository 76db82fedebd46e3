"""Language models: a small Llama that is trained here once, and SmolLM2-135M out of a PyPI package.

SmolLM2 comes in blocks of 32 on an asymmetric 4-bit grid, so its rows compare ways on other grids; they are no
figures of the published model.
"""

import io
import math
import time
from collections.abc import Iterable
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F

import smollm_gguf as gguf
from plain_models import Llama, Sizes, llama
from registry_data import CACHE, fetch, member
from smollm import MEMBER, SMOLLM
from texts import parts
from tuned.rows import AWQ, BALANCED, GPTQ, NEAREST, Limit
from tuned.subject import Subject

SMALL = Sizes(hidden=256, mlp=512, layers=4, heads=4, groups=2, words=1024, eps=1e-5)
SECONDS, BATCH, CONTEXT, RATE = 180.0, 16, 128, 3e-3
FILE, WORDS = CACHE / "llama-small.safetensors", CACHE / "llama-small-tokenizer.json"
AHEAD = (Limit("score", 0.0, GPTQ),)
WAYS = (NEAREST, GPTQ, BALANCED, AWQ)


def sequences(tokens: list[int], length: int, count: int) -> Tensor:
    """Rows of a text, one after another; the last word of each is only asked for."""
    if len(tokens) < count * (length + 1):
        raise ValueError(f"{len(tokens)} tokens are fewer than {count} rows of {length + 1}")
    return torch.tensor(tokens[: count * (length + 1)]).view(count, length + 1)


def losses(outputs: Tensor, answers: Tensor) -> Tensor:
    """(texts, words)."""
    return F.cross_entropy(outputs.flatten(0, 1), answers.flatten(), reduction="none").view_as(answers)


def language(
    name: str, model: Llama, text: tuple[Tensor, Tensor], size: int, precisions: tuple[str, ...], best: tuple[str, ...]
) -> Subject:
    """From rows of tokens that calibrate, and rows that judge; `best` at some of the precisions."""
    calibrating, judged = text

    def judging() -> Iterable[tuple[Tensor, Tensor]]:
        return ((rows[:, :-1], rows[:, 1:]) for rows in judged.split(size))

    calibration = [rows[:, :-1] for rows in calibrating.split(size)]
    limits = dict.fromkeys(precisions, AHEAD)
    return Subject(name, model, calibration, judging, losses, limits, {"head": None}, WAYS, best, is_perplexity=True)


def small() -> Subject:
    model, tokenizer = trained()
    text = parts()
    calibrating = sequences(tokenizer.encode(text["calibrate"]).ids, CONTEXT, 96)
    judged = sequences(tokenizer.encode(text["judge"]).ids, CONTEXT, 128)
    widths = ("8 per channel", "4 per channel", "3 per channel", "3 blocks of 128", "2 blocks of 32")
    precisions = tuple(f"int{width}" for width in widths)
    return language("Llama, 3 M, trained here", model, (calibrating, judged), 16, precisions, precisions)


def trained() -> tuple[Llama, Tokenizer]:
    """Out of the cache, or trained now."""
    model = llama(SMALL)
    if not (FILE.exists() and WORDS.exists()):
        text = parts()["train"]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=SMALL.words, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(text.split("\n\n"), trainer)
        _train(model, torch.tensor(tokenizer.encode(text).ids))
        FILE.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(WORDS))
        save_file(model.state_dict(), FILE)
    model.load_state_dict(load_file(FILE))
    return model.eval(), Tokenizer.from_file(str(WORDS))


def _train(model: Llama, tokens: Tensor) -> None:
    torch.manual_seed(0)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, betas=(0.9, 0.95))
    start, step = time.process_time(), 0
    while (done := (time.process_time() - start) / SECONDS) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / 100) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        starts = torch.randint(0, len(tokens) - CONTEXT - 1, (BATCH,))
        rows = torch.stack([tokens[place : place + CONTEXT + 1] for place in starts.tolist()])
        loss = losses(model(rows[:, :-1]), rows[:, 1:]).mean()
        optimizer.zero_grad()
        cast("Any", loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"training the small Llama: {done:.0%}, loss {loss:.3f}", flush=True)


def smollm() -> Subject:
    contents = gguf.read(io.BytesIO(member(fetch(*SMOLLM), MEMBER)))
    about, tokenizer = contents.about, gguf.tokenizer(contents.about)
    heads = about["llama.attention.head_count"]
    sizes = Sizes(
        hidden=about["llama.embedding_length"],
        mlp=about["llama.feed_forward_length"],
        layers=about["llama.block_count"],
        heads=heads,
        groups=heads // about["llama.attention.head_count_kv"],
        words=about["llama.vocab_size"],
        is_tied=True,
        base=about["llama.rope.freq_base"],
        eps=about["llama.attention.layer_norm_rms_epsilon"],
    )
    model = Llama(sizes)
    model.load_state_dict(state(contents.tensors, sizes))
    text = parts()
    calibrating = sequences(tokenizer.encode(text["calibrate"]).ids, 512, 16)
    judged = sequences(tokenizer.encode(text["judge"]).ids, 512, 12)
    widths = ("8 per channel", "4 blocks of 64", "3 blocks of 64", "2 blocks of 32", "4 per channel", "3 per channel")
    precisions = tuple(f"int{width}" for width in widths)  # 576 inputs are no blocks of 128
    return language("SmolLM2-135M", model.eval(), (calibrating, judged), 1, precisions, precisions[:4])


def state(tensors: dict[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Under our names; the rows of q and k, which GGUF keeps for neighbours that turn together, back in halves."""
    table = tensors["token_embd.weight"]
    found = {"embedding.weight": table, "head.weight": table, "norm.weight": tensors["output_norm.weight"]}
    names = {
        "attn_norm": "norm1", "ffn_norm": "norm2", "attn_q": "attention.q_proj", "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj", "attn_output": "attention.o_proj", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for block in range(sizes.layers):
        for theirs, ours in names.items():
            value = tensors[f"blk.{block}.{theirs}.weight"]
            if theirs in ("attn_q", "attn_k"):
                value = value.view(-1, sizes.head // 2, 2, sizes.hidden).transpose(1, 2).reshape(value.shape)
            found[f"blocks.{block}.{ours}.weight"] = value
    return found
