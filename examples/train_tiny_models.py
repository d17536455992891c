"""Train the byte-level models in kvgroups/assets, on text that a Python installation carries.

    python examples/train_tiny_models.py tiny-gemma3 --steps 600

The text is the prose of the standard library's docstrings and of `pydoc_data.topics`, so nothing is downloaded.
One thread, fp32, and batches drawn from the seed and the step alone: a run that was interrupted goes on from its
last checkpoint and ends where an uninterrupted one would have.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import platform
import random
import re
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, BambaConfig, Gemma3TextConfig, JambaConfig
from transformers.models.jamba import modeling_jamba

from kvgroups.testing.trained import nats_per_byte

SEQ_LEN, BATCH, PEAK_LR, WARMUP, SEED = 256, 8, 4e-3, 20, 0
DECAY = 0.3
"""The share of the steps, at the end, over which the learning rate falls to zero."""
EVERY = 25
"""Steps between two checkpoints, lines of progress and points of the loss curve."""
BOS, EOS, PAD = 256, 257, 258
"""Ids after those of the 256 bytes; 259 is unused and rounds the vocabulary up to a multiple of four."""

COMMON = {
    "vocab_size": 260,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "hidden_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}
CONFIGS = {
    "tiny-gemma3": Gemma3TextConfig(
        **COMMON,
        num_hidden_layers=6,
        intermediate_size=384,
        head_dim=32,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=64,
    ),
    "tiny-bamba": BambaConfig(
        **COMMON,
        num_hidden_layers=5,
        intermediate_size=384,
        attn_layer_indices=[2],
        mamba_n_heads=5,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_chunk_size=32,
    ),
    "tiny-jamba": JambaConfig(
        **COMMON,
        num_hidden_layers=4,
        intermediate_size=448,
        attn_layer_period=4,
        attn_layer_offset=2,
        num_experts=1,
        num_experts_per_tok=1,
        mamba_d_state=8,
    ),
}

PROSE = re.compile(r"[A-Z][A-Za-z0-9 ,.;:'()\-]*[.:]")


def docstrings() -> Iterator[str]:
    """The docstrings of the standard library, its tests left out, in the order of the files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"} & set(
            path.relative_to(root).parts
        ):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates and samples of broken code
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def prose(document: str) -> Iterator[str]:
    """The paragraphs that read as English, each on one line: no lists, no examples, no tables."""
    for block in re.split(r"\n\s*\n", document):
        block = textwrap.dedent(block).rstrip()
        text = re.sub(r'["*`]', "", " ".join(block.split()))
        if not re.search(r"^\s", block, re.MULTILINE) and len(text) >= 60 and PROSE.fullmatch(text):
            yield text


def read_corpus() -> tuple[list[str], str]:
    """The documents to train on, in a random order, and at least 10,000 characters that are held out."""
    seen: set[str] = set()
    documents = []
    for source in [*(topics[key] for key in sorted(topics)), *docstrings()]:
        fresh = [text for text in prose(source) if text not in seen]
        seen.update(fresh)
        if fresh:
            documents.append("\n".join(fresh) + "\n")
    random.Random(SEED).shuffle(documents)
    heldout = ""
    while len(heldout) < 10_000:
        heldout += documents.pop()
    return documents, heldout


def make_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose ids are the bytes of the text, with <bos> put before it."""
    # ByteLevel names each byte by a printable character: itself if it is one, else from U+0100 on, in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({names[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", BOS)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        split_special_tokens=True,  # the characters "<eos>" in a text are five bytes
        model_max_length=COMMON["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def selective_scan(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, **rest: Any
) -> Any:
    """Jamba's scan, for training: transformers' loop indexes one tensor at every step, and the gradient of each
    such index is as large as that tensor, which makes the backward pass quadratic in the length."""
    x, B, C = x.transpose(1, 2), B.transpose(1, 2), C.transpose(1, 2)
    dt = F.softplus(dt + rest["delta_bias"][:, None]).transpose(1, 2)
    decays = torch.exp(A * dt[..., None]).unbind(1)
    inputs = ((dt * x)[..., None] * B[:, :, None]).unbind(1)
    states = [torch.zeros_like(inputs[0])]
    for decay, new in zip(decays, inputs, strict=True):
        states.append(torch.addcmul(new, decay, states[-1]))
    y = (torch.stack(states[1:], 1) @ C[..., None]).squeeze(-1) + x * rest["D"]
    y = y.transpose(1, 2) * F.silu(rest["z"])
    return (y, states[-1]) if rest["return_last_state"] else y


def make_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, which comes as far as AdamW in half the time here, and AdamW for the rest."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and not re.search("embed_tokens|A_log", name)
        (matrices if is_matrix else rest).append(parameter)
    return [
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, weight_decay=0.01, betas=(0.9, 0.98)),
    ]


def learning_rate(step: int, steps: int) -> float:
    """Up over the warm-up, level, then down to zero. The level part is the same whatever `steps` is, so a run
    can be given more steps as long as it has not begun to go down."""
    return PEAK_LR * min(1.0, (step + 1) / WARMUP, (steps - step) / (DECAY * steps))


def train(name: str, steps: int, out: Path, checkpoints: Path) -> None:
    """Train one model from its last checkpoint on, and write it to `out / name`."""
    documents, heldout = read_corpus()
    tokens = torch.tensor([token for text in documents for token in (BOS, *text.encode(), EOS)])
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    optimizers = make_optimizers(model)
    state: dict[str, Any] = {"step": 0, "seconds": 0.0, "losses": [], "curve": []}
    checkpoint = checkpoints / f"{name}.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state.pop("model"))
        for optimizer, saved in zip(optimizers, state.pop("optimizers"), strict=True):
            optimizer.load_state_dict(saved)
    started = time.monotonic() - state["seconds"]
    for step in range(state["step"], steps):
        draw = torch.Generator().manual_seed(SEED * 1_000_000 + step)
        starts = torch.randint(len(tokens) - SEQ_LEN, (BATCH, 1), generator=draw)
        batch = tokens[starts + torch.arange(SEQ_LEN)]
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
            optimizer.step()
            optimizer.zero_grad()
        state["losses"].append(loss.item())
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            recent = state["losses"][-EVERY:]
            state.update(step=step + 1, seconds=time.monotonic() - started)
            state["curve"].append([step + 1, round(sum(recent) / len(recent), 3)])
            print(
                f"{name}: step {step + 1}/{steps}, loss {state['curve'][-1][1]}, {state['seconds']:.0f} s",
                flush=True,
            )
            learnt = {"model": model.state_dict(), "optimizers": [each.state_dict() for each in optimizers]}
            torch.save({**state, **learnt}, checkpoint)
    save(model, out / name, heldout, tokens, steps, state)


def save(
    model: torch.nn.Module,
    folder: Path,
    heldout: str,
    tokens: torch.Tensor,
    steps: int,
    state: dict[str, Any],
) -> None:
    """Write weights as fp16, to be loaded as fp32, with tokenizer, held-out text and the record of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "heldout.txt").write_text(heldout)
    model.half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written for its owner alone
    config = AutoConfig.from_pretrained(folder)
    config.dtype = "float32"
    config.save_pretrained(folder)
    make_tokenizer(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    record = {
        "parameters": loaded.num_parameters(),
        "seed": SEED,
        "steps": steps,
        "batch": [BATCH, SEQ_LEN],
        "peak_learning_rate": PEAK_LR,
        "training_bytes": len(tokens),
        "training_sha256": hashlib.sha256(bytes(str(tokens.tolist()), "ascii")).hexdigest(),
        "heldout_nats_per_byte": round(nats_per_byte(loaded, heldout), 3),
        "training_nats_per_byte": state["curve"],
        "wall_seconds": round(state["seconds"]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (folder / "training.json").write_text(json.dumps(record) + "\n")
    print(f"{folder.name}: {record['heldout_nats_per_byte']} nats a byte on the held-out text")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", default=list(CONFIGS), help=f"of {', '.join(CONFIGS)}; all if none"
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument(
        "--out", type=Path, default=Path("kvgroups/assets"), help="folder of the models' folders"
    )
    parser.add_argument("--checkpoints", type=Path, default=Path("build/checkpoints"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    modeling_jamba.mamba_selective_scan = selective_scan
    arguments.checkpoints.mkdir(parents=True, exist_ok=True)
    for name in arguments.names:
        train(name, arguments.steps, arguments.out, arguments.checkpoints)


if __name__ == "__main__":
    main()
