"""The conditions that travel with every number."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from kvgroups.ops.checks import dtype_name
from kvgroups.parity.report import Conditions


def conditions(model: PreTrainedModel, seed: int) -> Conditions:
    """Device, dtype, threads and versions of a check on `model`."""
    device, dtype, computed = str(model.device), dtype_name(model.dtype), computing_dtype(model)
    if computed != model.dtype:
        dtype = f"{dtype}, {dtype_name(computed)} autocast"
    if model.device.type == "cuda":
        device = f"{device} ({torch.cuda.get_device_name(model.device)})"
    return Conditions(
        device=device,
        dtype=dtype,
        threads=torch.get_num_threads(),
        kvgroups=sys.modules["kvgroups"].__version__,  # the root imports us, not the other way round
        commit=_commit(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        python=platform.python_version(),
        seed=seed,
    )


def computing_dtype(model: PreTrainedModel) -> torch.dtype:
    """The coarsest dtype that logits pass through: that of the weights, or autocast's where that is on."""
    device = model.device.type
    if model.dtype == torch.float64 or not torch.is_autocast_enabled(device):  # autocast leaves float64 alone
        return model.dtype
    return max(model.dtype, torch.get_autocast_dtype(device), key=lambda dtype: torch.finfo(dtype).eps)


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
