"""A KV-cache manager for Hugging Face causal language models whose layers remember differently.

    import kvgroups
    kvgroups.patch(model)            # model.generate() now runs on block tables
    kvgroups.check_parity(model)     # proof that the tokens did not change
    kvgroups.unpatch(model)          # the model is exactly as it was
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a source checkout specs, kernels and model_adapters lie beside this package; in a wheel they lie inside.
_checkout = Path(__file__).resolve().parents[1]
if not (Path(__file__).parent / "specs").is_dir() and (_checkout / "specs").is_dir():
    __path__.append(str(_checkout))

__version__ = "0.1.0"

_HOMES = {
    "GroupedCache": "kvgroups.cache",
    "KVGroupsConfig": "kvgroups.specs",
    "infer_config": "kvgroups.specs.infer",
    "is_patched": "kvgroups.patching",
    "patch": "kvgroups.patching",
    "unpatch": "kvgroups.patching",
    "check_parity": "kvgroups.parity",
}
"""Public names and where they live: importing kvgroups imports neither torch nor transformers."""

__all__ = [
    "GroupedCache",
    "KVGroupsConfig",
    "__version__",
    "check_parity",
    "infer_config",
    "is_patched",
    "patch",
    "unpatch",
]

if TYPE_CHECKING:
    from kvgroups.cache import GroupedCache
    from kvgroups.parity import check_parity
    from kvgroups.patching import is_patched, patch, unpatch
    from kvgroups.specs import KVGroupsConfig
    from kvgroups.specs.infer import infer_config


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvgroups' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
