"""`kvgroups plan`: tables and JSON, and one sentence for what cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvgroups.cli import app
from kvgroups.cli.errors import UsageError
from kvgroups.cli.sizes import parse_bytes
from kvgroups.sizes import in_units
from kvgroups.specs.presets import preset_names
from kvgroups.testing import tiny

ROOT = Path(__file__).resolve().parents[2]


def plan(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GiB", 80 * 2**30),
        ("80 gb", 80 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5KiB", 1536),
        ("0.1GB", 10**8),
        ("1048576", 2**20),
        ("7B", 7),
    ],
)
def test_sizes(text: str, nbytes: int):
    assert parse_bytes("--memory", text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "80Q", "-1GiB", "1e9", "80 GiB please"])
def test_texts_that_are_no_size(text: str):
    with pytest.raises(UsageError, match="--memory .*: expected a size like 80GiB"):
        parse_bytes("--memory", text)


def test_a_size_of_nothing():
    with pytest.raises(UsageError, match="must be at least one byte"):
        parse_bytes("--memory", "0.5B")


def test_bytes_in_units():
    assert [in_units(n) for n in (0, 1023, 1536, 123_594_752, 2**43)] == [
        "0 B", "1023 B", "1.5 KiB", "117.9 MiB", "8 TiB",
    ]  # fmt: skip


def test_a_preset_as_tables():
    result = plan("bamba-9b", "--memory", "80GiB", "--max-model-len", "131072", "--requests", "64")

    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    words = " ".join(result.stdout.split())
    for piece in (
        "bamba-9b",
        "80 GiB for 64 requests of up to 131,072 tokens",
        "117.9 MiB",
        "12 KiB",
        "3 in a slab",
    ):
        assert piece in words
    for piece in (
        "uniform page: blocks of 1,056 tokens",
        "padded eager, mixed",
        "32K tokens",
        "0.22%",
        "16 tokens by",
    ):
        assert piece in words


def test_a_preset_as_json():
    result = plan("gemma-3-27b", "--memory", "80GiB", "--json")

    data = json.loads(result.stdout)
    assert data["model"] == "gemma-3-27b"
    assert data["memory"] == 80 * 2**30
    assert data["lengths"] == [1024, 8192, 32768, 131072]
    assert [group["bytes_per_token"] for group in data["groups"]] == [425984, 81920]
    assert [scheme["name"] for scheme in data["schemes"]] == [
        "kvgroups", "uniform page", "padded eager", "padded eager, mixed",
    ]  # fmt: skip


def test_another_dtype_halves_the_tokens():
    two, one = (
        json.loads(plan("llama-3.1-8b", "--json", *dtype).stdout)["groups"][0]["bytes_per_token"]
        for dtype in ([], ["--dtype", "float8_e4m3fn"])
    )
    assert two == 2 * one


def test_a_folder_goes_through_transformers_config_without_weights(tmp_path):
    model = tiny("gemma3_text")
    model.config.save_pretrained(tmp_path)

    data = json.loads(plan(str(tmp_path), "--memory", "1MiB", "--dtype", "float32", "--json").stdout)

    assert [(group["name"], group["num_layers"], group["block_size"]) for group in data["groups"]] == [
        ("window", 4, 4), ("full", 2, 16),
    ]  # fmt: skip


def test_a_bundled_model():
    assert "window of 8" in plan("gemma3_text", "--memory", "1MiB").stdout


def test_the_names_of_the_presets():
    assert plan("--list").stdout.split() == list(preset_names())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a model or a preset; kvgroups plan --list"),
        (["bamba-9b", "--memory", "80Q"], "--memory '80Q': expected a size"),
        (["bamba-9b", "--memory", "1MiB"], "1048576 bytes hold not even one request"),
        (["bamba-9b", "--dtype", "int4"], "Preset.dtype: got 'int4'"),
        (["./nowhere"], "model './nowhere': there is no such folder"),
        (["gemma3_text", "--dtype", "int4"], "--dtype 'int4': expected one of"),
    ],
)
def test_what_cannot_be_used_is_one_sentence_and_exit_code_2(arguments: list[str], message: str):
    result = plan(*arguments)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("kvgroups: ") and message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_folder_without_a_config(tmp_path):
    result = plan(str(tmp_path))

    assert result.exit_code == 2
    assert "no preset (kvgroups plan --list), and transformers cannot build it from a config" in result.stderr


def test_a_preset_needs_neither_torch_nor_transformers():
    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom kvgroups.cli import app\n"
        "result = CliRunner().invoke(app, ['plan', 'bamba-9b'])\n"
        "assert result.exit_code == 0, result.output\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
