"""Results go to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from logging import ERROR, getLogger

from rich.console import Console

WIDTH = 100
"""Columns of a table where there is no terminal to ask, and at most."""


def result_console() -> Console:
    """A console on stdout for results."""
    console = Console(file=sys.stdout, highlight=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Send what other libraries print to stderr, and silence their advice and progress bars."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub = getLogger("huggingface_hub")  # counts its retries aloud
    hub_level = hub.level
    hub.setLevel(ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub.setLevel(hub_level)
        if had_bars:
            logging.enable_progress_bar()
