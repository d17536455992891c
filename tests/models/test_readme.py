"""The README's Python runs, on a tiny model in the place of a downloaded one."""

import copy
import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import kvgroups
from kvgroups.testing import tiny, tiny_names
from tests.models.conftest import UNSERVED

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_python_of_the_readme_runs(monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: tiny("gemma3_text"))
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    names = {
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "ids": ids,
        "mask": torch.ones_like(ids),
        "beam_idx": torch.tensor([1, 0]),
        "copy": copy,
    }
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["report"].passed
    assert names["config"].group("full").block_size == 32
    assert names["logits"].shape[:2] == (2, 1)
    assert kvgroups.is_patched(names["model"])


def test_the_readme_counts_the_families():
    names = tiny_names(all=True)
    served = len(names) - len(UNSERVED)
    assert f"Of the {len(names)} tiny models that the tests build, {served} are served and {len(UNSERVED)} are refused" in (
        " ".join(README.split())
    )
