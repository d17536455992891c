"""The command line: exit codes, what goes to stdout, and one sentence for what cannot be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from typer.testing import CliRunner

from kvgroups import KVGroupsConfig
from kvgroups.cli import app
from kvgroups.cli.models import load_model
from kvgroups.errors import UnsupportedModelError
from kvgroups.manager import Manager
from kvgroups.testing import tiny, tiny_names, trained_names

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--max-new-tokens", "6", "--workload", "single"]


def kvgroups(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_model_that_passes_prints_its_report_and_ends_with_0():
    result = kvgroups("parity", "gemma3_text", "--dtype", "fp32", *QUICK)

    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    for piece in ("gemma3_text", "window of 8", "blocks of 4, paged", "single prompt", "6/6", "passed"):
        assert piece in result.stdout


def test_several_models_end_in_a_summary_and_a_refused_one_is_not_proven():
    result = kvgroups("parity", "llama", "rwkv", *QUICK)

    assert result.exit_code == 1
    assert "rwkv refused: RwkvForCausalLM" in " ".join(result.stdout.split())


def test_a_fault_ends_with_1(monkeypatch):
    monkeypatch.setattr(Manager, "free", lambda self, request: None)
    result = kvgroups("parity", "llama", *QUICK)

    assert result.exit_code == 1
    assert "failed" in result.stdout and "still held" in result.stdout


def test_json_is_one_object_and_nothing_else():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kvgroups", "parity", "bamba", "rwkv", "--json", *QUICK]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)

    found = json.loads(result.stdout)
    assert result.returncode == 1 and found["passed"] is True
    assert [model["model"] for model in found["models"]] == ["bamba"]
    assert found["models"][0]["verdict"] == "passed"
    assert found["models"][0]["workloads"][0]["tokens_agree"] == 6
    assert found["models"][0]["conditions"]["dtype"] == "float32"
    assert [model["model"] for model in found["refused"]] == ["rwkv"]
    assert "Traceback" not in result.stderr


def test_one_refused_model_is_an_object_too():
    result = kvgroups("parity", "rwkv", "--json", *QUICK)

    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert found["passed"] is False and found["models"] == []
    assert [model["model"] for model in found["refused"]] == ["rwkv"]


def test_a_folder_with_a_saved_model_and_a_config_of_ones_own(tmp_path):
    tiny("gemma3_text").save_pretrained(tmp_path / "model")
    printed = kvgroups("config", "gemma3_text")
    assert printed.exit_code == 0
    (tmp_path / "groups.yaml").write_text(printed.stdout.replace("block_size: 4", "block_size: 2"))
    assert KVGroupsConfig.load(tmp_path / "groups.yaml").group("window").block_size == 2

    result = kvgroups("parity", tmp_path / "model", "--config", tmp_path / "groups.yaml", *QUICK)

    assert result.exit_code == 0, result.output
    assert "blocks of 2, paged" in result.stdout


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_a_folder_without_a_tokenizer_is_asked_random_ids(family, tmp_path):
    """Of these transformers makes up a tokenizer that reads no word."""
    tiny(family).save_pretrained(tmp_path)
    assert load_model(str(tmp_path), dtype=torch.float32)[1] is None
    result = kvgroups("parity", tmp_path, *QUICK)
    assert result.exit_code == 0, result.output


def test_config_prints_json_that_loads():
    result = kvgroups("config", "bamba", "--json")
    groups = KVGroupsConfig.model_validate_json(result.stdout).groups
    assert {group.name for group in groups} == {"full", "state"}


def test_names_and_version():
    assert kvgroups("parity", "--list").stdout.split() == [*trained_names(), *tiny_names(all=True)]
    assert kvgroups("version").stdout.startswith("kvgroups ")


def test_trained_models_come_first_and_are_asked_english(monkeypatch):
    import kvgroups
    from kvgroups.parity.prompts import ENGLISH

    asked = []

    def note(model, *, tokenizer, name, **options):
        asked.append((name, None if tokenizer is None else tokenizer(ENGLISH[1]).input_ids))
        raise UnsupportedModelError("not now")

    monkeypatch.setattr(kvgroups, "check_parity", note)
    assert CliRunner().invoke(app, ["parity"]).exit_code == 1
    assert [name for name, _ in asked] == [*trained_names(), *tiny_names()]
    assert [ids is not None for _, ids in asked] == [True] * len(trained_names()) + [False] * len(
        tiny_names()
    )
    assert bytes(asked[0][1][1:]).decode() == ENGLISH[1]


@pytest.fixture
def hub_asked(monkeypatch):
    """A hub that cannot be reached, and what it was asked."""
    asked = []

    def model_info(self, name, *, timeout):
        asked.append(name)
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    return asked


def test_a_model_that_nobody_knows_is_asked_for_once(hub_asked):
    result = kvgroups("parity", "lama")

    assert result.exit_code == 2
    assert "model 'lama': neither bundled (kvgroups parity --list)" in result.stderr
    assert "no route to host. Did you mean llama" in result.stderr
    assert hub_asked == ["lama"]


def test_a_model_that_the_hubs_client_keeps_needs_no_hub(hub_asked, monkeypatch, tmp_path):
    folder = tmp_path / "models--somebody--some-model"
    tiny("llama").save_pretrained(folder / "snapshots" / "1234")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1234")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.file_download, "HF_HUB_CACHE", str(tmp_path), raising=False)

    assert kvgroups("parity", "somebody/some-model", *QUICK).exit_code == 0
    assert hub_asked == []

    (folder / "snapshots" / "1234" / "model.safetensors").unlink()
    result = kvgroups("parity", "somebody/some-model", *QUICK)
    assert result.exit_code == 2 and "no route to host" in result.stderr
    assert hub_asked == ["somebody/some-model"]


def test_help_is_fast_because_it_imports_no_torch():
    code = "import sys, kvgroups.cli; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./no-such-folder"], "model './no-such-folder': there is no such folder"),
        (["rwkv"], "RwkvForCausalLM: its forward takes no `cache` argument"),
        (["llama", "--dtype", "float8"], "--dtype 'float8': expected one of float32"),
        (["llama", "--device", "abacus"], "--device 'abacus'"),
        (["llama", "--workload", "rugged"], "workloads: got 'rugged'; choose from single"),
        (["llama", "--all"], "--all runs every bundled model"),
        (["a/b/c"], "model 'a/b/c': neither bundled"),
        ([""], "model '': expected the name of a bundled model"),
        (["llama", "--prompts", "{folder}/absent.txt"], "absent.txt: cannot be read: No such file"),
        (["llama", "--prompts", "{folder}/empty.txt"], "empty.txt: holds no prompts; write one a line"),
        (["llama", "--prompts", "{folder}/prompts.txt"], "llama has no tokenizer"),
        (["llama", "--config", "{folder}/absent.yaml"], "absent.yaml: cannot be read: No such file"),
        (["llama", "--config", "{folder}/broken.yaml"], "broken.yaml: expected YAML"),
        (["llama", "--config", "{folder}/latin1.yaml"], "latin1.yaml: expected text in UTF-8"),
        (["llama", "--config", "{folder}/latin1.json"], "latin1.json: expected text in UTF-8"),
        (["llama", "--config", "{folder}/empty.yaml"], "empty.yaml: expected a mapping with `groups`"),
        (["llama", "--config", "{folder}/list.yaml"], "list.yaml: expected a mapping with `groups`"),
        (["llama", "--config", "{folder}/gemma.yaml"], "layer"),
    ],
)
def test_what_cannot_be_used_gives_one_sentence_and_2(arguments, message, tmp_path):
    (tmp_path / "empty.txt").write_text("\n  \n")
    (tmp_path / "prompts.txt").write_text("Hello\n")
    (tmp_path / "broken.yaml").write_text("groups: [")
    (tmp_path / "latin1.yaml").write_bytes("größe: 4".encode("latin-1"))
    (tmp_path / "latin1.json").write_bytes("größe: 4".encode("latin-1"))
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    (tmp_path / "list.yaml").write_text("- groups\n")
    (tmp_path / "gemma.yaml").write_text(GEMMA_GROUPS)
    result = kvgroups("parity", *(argument.format(folder=tmp_path) for argument in arguments))

    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("kvgroups: ") and result.stderr.count("\n") == 1
    assert result.stdout == ""


GEMMA_GROUPS = """
max_model_len: 64
groups:
- {name: full, layers: [0, 1, 2, 3, 4, 5], spec: {kind: full_attention, num_kv_heads: 2, head_dim: 8, dtype: float32}}
"""
"""Groups of a model with two layers more than the tiny llama has."""
