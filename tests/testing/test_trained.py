"""The trained models write words, and write the same ones on grouped caches."""

from __future__ import annotations

import importlib.util
import random
import re
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

import kvgroups
from kvgroups.errors import UnsupportedModelError
from kvgroups.testing import trained, trained_names
from kvgroups.testing.trained import heldout_text, nats_per_byte

Trained = tuple[PreTrainedModel, PreTrainedTokenizerBase]

WINDOW = 64
"""Tokens that the windowed layers of tiny-gemma3 see."""
ENOUGH = 1.25
"""Nats a byte. Letter frequencies alone reach 3.1, pairs of letters 2.5."""
WORDS = {word for text in topics.values() for word in re.findall("[a-z]+", text.lower())}
"""Words of the Python documentation."""
PROMPTS = (
    "The method returns a new object that holds the names of all arguments, in the order in which they were given, "
    "and the default value of",
    "If the file is opened in text mode, the encoding of the platform is used to read it. When an error is found in "
    "the first line of the file, the function raises a",
    "A class definition is an executable statement. It is first evaluated in the namespace of the module, and then "
    "the",
)


@pytest.fixture(scope="module", params=trained_names())
def pair(request: pytest.FixtureRequest) -> Trained:
    return trained(request.param)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return trained("tiny-gemma3")[1]


def answer(pair: Trained, prompt: str, num_new: int) -> list[int]:
    """Exactly `num_new` greedy tokens."""
    model, tokenizer = pair
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False)
    return output[0, inputs.input_ids.shape[1] :].tolist()


def share_of_words(text: str) -> float:
    """Among runs of letters; the last one may have been cut."""
    found = re.findall("[a-z]+", text.lower())[:-1]
    return sum(word in WORDS for word in found) / len(found)


def test_predicts_text_that_it_never_saw(pair: Trained):
    assert nats_per_byte(pair[0], heldout_text()[:4096]) < ENOUGH


def test_an_untrained_model_does_not_pass(pair: Trained):
    untrained = AutoModelForCausalLM.from_config(pair[0].config)
    assert nats_per_byte(untrained, heldout_text()[:1024]) > 4 * ENOUGH


@pytest.mark.parametrize("prompt", PROMPTS)
def test_writes_words(pair: Trained, prompt: str):
    text = pair[1].decode(answer(pair, prompt, 100))
    letters = random.Random(0).sample(text, len(text))

    assert share_of_words(text) >= 0.85, text
    assert len(set(text.split())) >= 5, text
    assert share_of_words("".join(letters)) < 0.5


@pytest.mark.parametrize("prompt", PROMPTS)
def test_writes_the_same_on_grouped_caches(pair: Trained, prompt: str):
    assert len(prompt) > WINDOW
    expected = answer(pair, prompt, 64)
    kvgroups.patch(pair[0])
    try:
        assert answer(pair, prompt, 64) == expected
    finally:
        kvgroups.unpatch(pair[0])


def test_is_ready_to_use(pair: Trained):
    model, tokenizer = pair
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert 1_000_000 < model.num_parameters() < 3_000_000
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert ids == [model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id]


@pytest.mark.parametrize("name", trained_names())
def test_loads_as_any_folder_does(name: str):
    """Without a dtype asked for, too, the weights become float32: float16 is only how they are kept."""
    folder = files("kvgroups.assets") / name
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32
    assert len(AutoTokenizer.from_pretrained(folder)) == 256 + 3


def test_other_dtypes():
    assert trained("tiny-bamba", dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(
        UnsupportedModelError, match="'tiny-gpt'. Use one of: tiny-gemma3, tiny-bamba, tiny-jamba"
    ):
        trained("tiny-gpt")


@given(st.text())
def test_tokens_are_the_bytes_of_the_text(tokenizer: PreTrainedTokenizerBase, text: str):
    ids = tokenizer(text).input_ids
    assert ids == [tokenizer.bos_token_id, *text.encode()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    "text", ["", "  two  spaces ", "a\r\n\tb\0", "naïve e\u0301 ﬁ", "日本語 🧑‍🚀", "<bos>a<eos><pad>"]
)
def test_any_text_comes_back(tokenizer: PreTrainedTokenizerBase, text: str):
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_a_stop_token_ends_an_answer(pair: Trained):
    """What ends a document is read from the model's own files."""
    assert pair[0].generation_config.eos_token_id == pair[1].eos_token_id


def test_all_of_it_is_small():
    assets = files("kvgroups.assets")
    sizes = [file.stat().st_size for file in assets.rglob("*") if file.is_file()]
    assert sum(sizes) < 12e6


@pytest.fixture
def script() -> ModuleType:
    """The script that trained them."""
    path = Path(__file__).parents[2] / "examples" / "train_tiny_models.py"
    spec = importlib.util.spec_from_file_location("train_tiny_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_training_goes_on_after_an_interruption_as_if_there_had_been_none(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(script, "EVERY", 2)
    monkeypatch.setattr(script, "read_corpus", lambda: ([heldout_text()[:4000]], heldout_text()[4000:5000]))

    def weights(folder: Path) -> bytes:
        script.train("tiny-bamba", 4, folder, folder)
        return (folder / "tiny-bamba" / "model.safetensors").read_bytes()

    (tmp_path / "at once").mkdir()
    (tmp_path / "in parts").mkdir()
    learning_rate = script.learning_rate
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(script, "learning_rate", lambda step, steps: learning_rate(step, steps) / (step != 3))
        weights(tmp_path / "in parts")
    assert (tmp_path / "in parts" / "tiny-bamba.pt").exists()

    assert weights(tmp_path / "in parts") == weights(tmp_path / "at once")


@pytest.mark.slow
def test_the_text_to_train_on_is_prose_without_what_is_held_out(script: ModuleType):
    documents, heldout = script.read_corpus()

    lines = [line for document in documents for line in document.splitlines()]
    assert sum(map(len, lines)) > 400_000
    assert not set(lines) & set(heldout.splitlines())
    assert all(script.PROSE.fullmatch(line) for line in lines)
