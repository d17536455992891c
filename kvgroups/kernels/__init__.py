"""One folder per operation: a naive reference, a vectorised torch form, and what runs faster where it pays.

In a source checkout the folders lie in `<root>/kernels`, which carries no `__init__.py`, because Hugging Face
has a package of that name and transformers would import ours in its place.
"""

from pathlib import Path

_checkout = Path(__file__).resolve().parents[2] / "kernels"
if not (Path(__file__).parent / "paged_attention").is_dir() and (_checkout / "paged_attention").is_dir():
    __path__.append(str(_checkout))
