"""`kvgroups plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from kvgroups.plan import MemoryPlan
    from kvgroups.specs import KVGroupsConfig


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A preset (--list), a bundled tiny model, a folder with a config.json, or a hub id."
        ),
    ] = "",
    memory: Annotated[
        str, typer.Option(help="Bytes for the caches: 80GiB, 80GB, 512MiB or a number.")
    ] = "80GiB",
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of the longest request; the model's own if not given.", show_default=False
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 64,
    dtype: Annotated[
        str | None, typer.Option(help="Of the caches; the preset's, or bfloat16.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")
    ] = False,
    names: Annotated[bool, typer.Option("--list", help="Print the names of the presets.")] = False,
) -> None:
    """Say what a model's caches cost and what fits, without weights and without a GPU.

    For each KV-cache group its block, bytes per token and per request, and waste; how many requests of which length fit,
    and how long --requests of them may be; and the same for one page size for all layers and for the padded eager cache.
    """
    from kvgroups.cli.errors import UsageError, usage_errors

    with usage_errors():
        from kvgroups.cli.sizes import parse_bytes
        from kvgroups.plan import MemoryPlan
        from kvgroups.specs.presets import preset_names

        if names:
            typer.echo("\n".join(preset_names()))
            return
        if not model:
            raise UsageError("name a model or a preset; kvgroups plan --list shows the presets")
        nbytes = parse_bytes("--memory", memory)
        config, stored = _config(model, dtype)
        made = MemoryPlan.for_config(
            config, memory=nbytes, num_requests=requests, max_model_len=max_model_len
        )
        if as_json:
            typer.echo(json.dumps({"model": model, "dtype": stored, **made.as_dict()}, indent=2))
            return
        from kvgroups.cli.output import result_console

        result_console().print(_render(model, stored, made))


def _config(model: str, dtype: str | None) -> tuple[KVGroupsConfig, str]:
    """The groups of a preset or of a model, and the name of the dtype that they are stored in."""
    from kvgroups.specs.presets import preset, preset_names

    if model not in preset_names():
        return _inferred(model, dtype or "bfloat16"), dtype or "bfloat16"
    chosen = preset(model)
    if dtype is not None:
        chosen = chosen.with_dtype(dtype)
    return chosen.config, chosen.dtype


def _inferred(name: str, dtype: str) -> KVGroupsConfig:
    """The groups of a model that is built without weights, from its config alone."""
    from kvgroups import infer_config
    from kvgroups.cli.errors import UsageError
    from kvgroups.cli.models import load_model, parse_dtype
    from kvgroups.cli.output import quiet_stdout
    from kvgroups.testing import tiny_names, trained_names

    weights = parse_dtype(dtype)
    with quiet_stdout():
        if name in (*tiny_names(all=True), *trained_names()):
            return infer_config(load_model(name, dtype=weights)[0])

        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
            raise UsageError(f"model {name!r}: there is no such folder")
        try:
            config = AutoConfig.from_pretrained(str(Path(name).expanduser()))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=weights)
        except Exception as error:  # transformers and the hub client raise many kinds
            raise UsageError(
                f"model {name!r}: no preset (kvgroups plan --list), and transformers cannot build it from a config: "
                f"{str(error).strip().splitlines()[0]}"
            ) from None
        return infer_config(model)


def _render(model: str, dtype: str, plan: MemoryPlan) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    from kvgroups.sizes import in_units

    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(model, style="bold")
    title.append(
        f"  {dtype}, {in_units(plan.memory)} for {plan.num_requests} requests of up to {plan.max_model_len:,} tokens",
        style="dim",
    )
    notes = [
        f"an arena of slabs of {in_units(plan.slab_bytes)}, of which groups lease what they need",
        *(f"{group.name}: {group.why}" for group in plan.groups),
        *(f"{scheme.name}: {scheme.note}" for scheme in plan.schemes),
    ]
    return Group(
        title,
        _groups(plan),
        _requests(plan),
        _schemes(plan),
        *(Padding(Text(note, style="dim")) for note in notes),
    )


def _groups(plan: MemoryPlan) -> Table:
    """What each group's blocks are."""
    from kvgroups.sizes import in_units

    table = _table("group", "kind", "layers", "block", "bytes", "a token", "leased as", "waste")
    for group in plan.groups:
        is_state = group.bytes_per_token == 0
        leased = "a slab" if group.slabs_per_lease == 1 else f"{group.slabs_per_lease} slabs"
        table.add_row(
            group.name,
            group.kind.replace("_", " "),
            f"{group.num_layers}",
            "states" if is_state else f"{group.block_size} tokens",
            in_units(group.block_bytes),
            "" if is_state else in_units(group.bytes_per_token),
            f"{group.blocks_per_lease} in {leased}",
            f"{group.waste:.2%}",
        )
    return table


def _requests(plan: MemoryPlan) -> Table:
    """What one request owns in each group."""
    from kvgroups.sizes import in_units

    table = _table("bytes of one request", *_lengths(plan))
    for group in plan.groups:
        table.add_row(group.name, *(in_units(nbytes) for nbytes in group.request_bytes))
    return table


def _schemes(plan: MemoryPlan) -> Table:
    """How many requests of one length fit, and how long as many as are asked for may be."""
    table = _table("requests that fit", *_lengths(plan), f"{plan.num_requests} requests of up to")
    for scheme in plan.schemes:
        table.add_row(
            scheme.name,
            *(f"{count:,}" for count in scheme.num_requests),
            f"{scheme.longest:,} tokens" if scheme.longest else "none",
        )
    return table


def _table(first: str, *others: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _lengths(plan: MemoryPlan) -> list[str]:
    """`8192` -> "8K tokens"."""
    return [f"{n // 1024:,}K tokens" if n % 1024 == 0 else f"{n:,} tokens" for n in plan.lengths]
