"""A small Llama that learned a little, in a folder as transformers writes it."""

import warnings

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS, END = 320, "</s>"


def text(count, seed=0):
    """Sentences with rules that can be learned."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*among):
        return among[int(torch.randint(len(among), (1,), generator=generator))]

    parts = []
    for _ in range(count):
        first, other = pick("cat", "dog", "bird"), pick("cat", "dog", "bird")
        verb = {"cat": "sees", "dog": "eats", "bird": "finds"}[first]
        parts.append(f"the {pick('small', 'big', 'red')} {first} {verb} a {pick('old', 'red')} {other} , and then it ")
        parts.append({"cat": "sleeps", "dog": "runs", "bird": "likes it"}[other] + " . ")
    return "".join(parts)


def train(model, tokens, steps=60):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - 33, (16,), generator=generator)
        batch = torch.stack([tokens[start : start + 33] for start in starts])
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def write_tokenizer(folder):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, initial_alphabet=alphabet, show_progress=False, special_tokens=[END]
    )
    tokenizer.train_from_iterator([text(100, seed=9)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END)
    fast.save_pretrained(folder)
    return fast


def write_llama(folder, tokens, *, words, hidden=64, inner=128, steps=60):
    """A Llama of two blocks, its head tied to the embeddings, that learned from tokens; with texts to go on with."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=words,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = train(LlamaForCausalLM(config), torch.tensor(tokens), steps=steps)
        model.save_pretrained(folder)
    (folder / "calibration.txt").write_text(text(150, seed=5))
    (folder / "judge.txt").write_text(text(60, seed=6))
    return model


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """(folder, model)."""
    folder = tmp_path_factory.mktemp("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = write_tokenizer(folder)
    return folder, write_llama(folder, tokenizer.encode(text(400)), words=WORDS)


@pytest.fixture(scope="session")
def wide(tmp_path_factory):
    """A Llama whose heads have 32 channels, the size of llama.cpp's blocks in a quantized cache."""
    folder = tmp_path_factory.mktemp("wide")
    tokenizer = write_tokenizer(folder)
    write_llama(folder, tokenizer.encode(text(400)), words=WORDS, hidden=128, inner=128, steps=10)
    return folder
