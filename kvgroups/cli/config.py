"""`kvgroups config`."""

from __future__ import annotations

from typing import Annotated

import typer


def config(
    model: Annotated[str, typer.Argument(help="A bundled model, gemma-3-270m, a folder, or a hub id.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "float32",
) -> None:
    """Print the KV-cache groups that a model gets, as `--config` of `kvgroups parity` reads them."""
    from kvgroups.cli.errors import usage_errors

    with usage_errors():
        from kvgroups import infer_config
        from kvgroups.cli.models import load_model, parse_dtype
        from kvgroups.cli.output import quiet_stdout

        with quiet_stdout():
            inferred = infer_config(load_model(model, dtype=parse_dtype(dtype))[0])
        typer.echo(inferred.model_dump_json(indent=2) if as_json else str(inferred))
