"""`kvgroups generate`: text on stdout as it comes, one line on stderr, and one sentence for what cannot be used."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvgroups
from kvgroups.cli import app
from kvgroups.cli.stream import MeteredStreamer
from kvgroups.testing import tiny, trained

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The function returns a list of all the names that"


def generate(*arguments):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


@pytest.fixture(scope="module")
def greedy() -> str:
    """What eager generation answers to PROMPT in 20 tokens, the prompt before it."""
    model, tokenizer = trained("tiny-gemma3")
    ids = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=20, do_sample=False)[0]
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_prints_the_text_and_a_line_about_it(greedy: str):
    result = generate("tiny-gemma3", "--prompt", PROMPT, "--max-new-tokens", 20)

    assert result.exit_code == 0, result.output
    assert result.stdout == greedy + "\n"
    assert re.fullmatch(
        r"20 tokens in [\d.]+ s, [\d.]+ tokens/s; KV cache at its peak [\d.]+ KiB: "
        r"window [\d.]+ KiB, full [\d.]+ KiB\n",
        result.stderr,
    )


def test_a_folder_is_as_good_as_a_name(tmp_path: Path, greedy: str):
    for part in trained("tiny-gemma3"):
        part.save_pretrained(tmp_path)
    assert generate(tmp_path, "--prompt", PROMPT, "--max-new-tokens", 20).stdout == greedy + "\n"


def test_a_temperature_of_zero_is_greedy(greedy: str):
    options = ["--max-new-tokens", 20, "--temperature", 0]
    assert generate("tiny-gemma3", "--prompt", PROMPT, *options).stdout == greedy + "\n"


@pytest.mark.parametrize(
    "option",
    [
        ("--temperature", 1.5),
        pytest.param(("--top-k", 20), marks=pytest.mark.slow),
        pytest.param(("--top-p", 0.99), marks=pytest.mark.slow),
    ],
)
def test_a_seed_gives_the_same_sample_again(option: tuple, greedy: str):
    def sample(seed: int) -> str:
        options = ["--max-new-tokens", 20, "--seed", seed, *option]
        return generate("tiny-bamba", "--prompt", PROMPT, *options).stdout

    assert sample(1) == sample(1)
    assert len({sample(1), sample(2), sample(3)}) > 1


def test_a_top_k_of_one_is_greedy(greedy: str):
    options = ["--max-new-tokens", 20, "--top-k", 1, "--temperature", 5]
    assert generate("tiny-gemma3", "--prompt", PROMPT, *options).stdout == greedy + "\n"


def test_text_comes_before_the_end():
    """And a prompt that is not ASCII comes back whole."""
    prompt = "Naïve 日本: The function returns"
    command = [sys.executable, "-m", "kvgroups", "generate", "tiny-gemma3", "--prompt", prompt]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    start = process.stdout.read(len(prompt.encode()) + 3)
    was_running = process.poll() is None
    rest, errors = process.communicate(timeout=120)

    assert start.decode().startswith(prompt)
    assert was_running and len(rest) > 3
    assert process.returncode == 0
    assert errors.decode().count("\n") == 1, errors.decode()


@pytest.mark.parametrize("name", ["tiny-gemma3", "tiny-jamba"])
def test_the_peak_is_the_managers(name: str):
    """At 150 tokens the window has let go of blocks, and the peak is no sum of the groups' own peaks."""
    model, tokenizer = trained(name)
    manager = vars(kvgroups.patch(model))["_kvgroups"].context.manager
    streamer = MeteredStreamer(tokenizer, manager, io.StringIO())
    model.generate(**tokenizer(PROMPT * 2, return_tensors="pt"), max_new_tokens=50, streamer=streamer)

    assert streamer.peak.held_bytes == manager.usage().peak_held_bytes > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["llama"],
            "model 'llama': a tiny family has random weights and no tokenizer, so it writes no text; use tiny-",
        ),
        (["./no-such-folder"], "model './no-such-folder': there is no such folder"),
        (["{folder}/llama"], "there is no tokenizer beside it"),
        (["{folder}/qwen2"], "there is no tokenizer beside it"),
        (["tiny-jamba", "--dtype", "float8"], "--dtype 'float8': expected one of float32"),
        (["tiny-jamba", "--device", "abacus"], "--device 'abacus'"),
        (["tiny-jamba", "--temperature", "0", "--top-k", "3"], "--temperature 0 is greedy"),
        (["tiny-jamba", "--max-new-tokens", "9999999"], "max_model_len is"),
    ],
)
def test_what_cannot_be_used_gives_one_sentence_and_2(arguments: list[str], message: str, tmp_path: Path):
    for family in ("llama", "qwen2"):  # of the second transformers makes up a tokenizer that reads no word
        tiny(family).save_pretrained(tmp_path / family)
    result = generate(*(argument.format(folder=tmp_path) for argument in arguments), "--prompt", "Hello")

    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("kvgroups: ") and result.stderr.count("\n") == 1
    assert result.stdout == ""
