"""Memory that is made in inference mode serves forwards outside of it, and the other way round."""

import pytest
import torch

import kvgroups
from kvgroups.testing import tiny


@pytest.mark.parametrize("family", ["gemma3_text", "bamba"])
def test_a_cache_goes_from_mode_to_mode(family):
    model, ids = kvgroups.patch(tiny(family)), torch.tensor([[5, 6, 7]])
    cache, other = kvgroups.GroupedCache(model), kvgroups.GroupedCache(model)
    with torch.inference_mode():
        model(ids, cache=cache)
        inside = model.generate(ids, max_new_tokens=30, do_sample=False)
    with torch.no_grad():
        model(ids, cache=cache)
        model(ids, cache=other)
    with torch.inference_mode():
        model(ids, cache=other)
        model(ids, cache=cache)
    assert model.generate(ids, max_new_tokens=30, do_sample=False).tolist() == inside.tolist()
