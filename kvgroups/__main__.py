"""`python -m kvgroups` is the command `kvgroups`."""

from kvgroups.cli import app

app(prog_name="kvgroups")
