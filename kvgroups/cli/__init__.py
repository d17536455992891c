"""The command line: one file for each command. Importing it imports neither torch nor transformers."""

from __future__ import annotations

import typer

from kvgroups.cli.config import config
from kvgroups.cli.doctor import doctor
from kvgroups.cli.generate import generate
from kvgroups.cli.kernels import kernels
from kvgroups.cli.parity import parity
from kvgroups.cli.plan import plan
from kvgroups.cli.version import version

app = typer.Typer(
    name="kvgroups",
    help="Grouped paged KV caches for Hugging Face causal language models, and proof that tokens do not change.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (parity, generate, config, plan, kernels, doctor, version):
    app.command()(command)

__all__ = ["app"]
