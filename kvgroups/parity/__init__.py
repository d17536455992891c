"""Proof that a patched model chooses the tokens that it chose before, and by how much its logits moved."""

from kvgroups.parity.check import check_parity
from kvgroups.parity.report import ParityError, ParityReport
from kvgroups.parity.workloads import WORKLOADS

__all__ = ["WORKLOADS", "ParityError", "ParityReport", "check_parity"]
