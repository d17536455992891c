"""`kvgroups generate`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvgroups.cli.errors import UsageError, usage_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


def generate(
    model: Annotated[
        str,
        typer.Argument(help="tiny-gemma3, tiny-bamba, tiny-jamba, gemma-3-270m, a folder, or a hub id."),
    ],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 200,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sample at this temperature; 0 is greedy.", show_default=False)
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Sample among the K likeliest tokens.", show_default=False)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Sample among the likeliest that sum to P.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
) -> None:
    """Write on from a prompt, on grouped paged caches, and show the text as it comes.

    Greedy, unless one of --temperature, --top-k and --top-p is given.

    Prompt and text go to stdout, one line about tokens, speed and memory to
    stderr. Exit code 2 if something given cannot be used.
    """
    out = sys.stdout
    with usage_errors():
        choice = _choice(temperature, top_k, top_p)

        from kvgroups.cli.models import parse_dtype
        from kvgroups.cli.output import quiet_stdout

        weights = parse_dtype(dtype)
        with quiet_stdout():
            import torch

            from kvgroups import patch
            from kvgroups.cli.stream import MeteredStreamer

            lm, tokenizer = _load(model, dtype=weights, device=device)
            ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
            if ids.shape[1] == 0:
                raise UsageError(f"--prompt {prompt!r}: {model} reads no token in it; write at least a word")
            patch(lm)
            streamer = MeteredStreamer(tokenizer, lm.__dict__["_kvgroups"].context.manager, out)
            torch.manual_seed(seed)
            lm.generate(
                ids,
                attention_mask=torch.ones_like(ids),  # the prompt may hold the padding token
                max_new_tokens=max_new_tokens,
                streamer=streamer,
                **choice,
            )
    typer.echo(streamer.summary(), err=True)


def _choice(temperature: float | None, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    """How `generate` picks a token; what a model's own generation config says about it does not count."""
    if temperature == 0 or (temperature is None and top_k is None and top_p is None):
        if top_k is not None or top_p is not None:
            raise UsageError(
                "--temperature 0 is greedy and leaves nothing to --top-k and --top-p; leave it or them out"
            )
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": 1.0 if temperature is None else temperature,
        "top_k": 0 if top_k is None else top_k,
        "top_p": 1.0 if top_p is None else top_p,
    }


def _load(name: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from kvgroups.cli.models import load_model
    from kvgroups.testing import tiny_names, trained_names

    if name in tiny_names(all=True):
        raise UsageError(
            f"model {name!r}: a tiny family has random weights and no tokenizer, so it writes no text; use "
            f"{', '.join(trained_names())}, gemma-3-270m, a folder or a hub id"
        )
    model, tokenizer = load_model(name, **options)
    if tokenizer is None:
        raise UsageError(
            f"model {name!r}: there is no tokenizer beside it that transformers can load; add one"
        )
    return model, tokenizer
