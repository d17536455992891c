"""The KV sanitizer through whole models: it finds nothing, changes no token, and poison reaches no logit."""

import copy

import pytest
import torch

import kvgroups
from kvgroups import ops
from kvgroups.errors import SanitizerError
from kvgroups.testing import tiny

FAMILIES = ["gemma3_text", "llama4_text", "bamba", "jamba", "qwen3_next", "deepseek_v3"]


def sanitized(family: str, **config):
    model = tiny(family)
    return kvgroups.patch(model, kvgroups.infer_config(model, sanitize=True, **config))


def prompts() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 97, (2, 23), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", [{"num_beams": 3}, {"prefill_chunk_size": 6}], ids=["beams", "chunks"])
def test_generate_says_nothing_and_gives_the_same_tokens(family, how):
    plain, model = kvgroups.patch(tiny(family)), sanitized(family)
    settings = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, **how}
    assert model.generate(**prompts(), **settings).tolist() == plain.generate(**prompts(), **settings).tolist()
    manager = vars(model)["_kvgroups"].context.manager
    manager.check()
    manager.arena.check_null()


@pytest.mark.parametrize("family", ["gemma3_text", "bamba"])
def test_drafts_and_forks_say_nothing(family):
    model = sanitized(family)
    cache = kvgroups.GroupedCache(model, max_rewind=4)
    ids = prompts()["input_ids"][:1]
    with torch.no_grad():
        model(ids[:, :14], cache=cache)
        for start in (14, 16, 18):
            twin = copy.deepcopy(cache)
            model(ids[:, start : start + 4], cache=cache)
            cache.crop(-2)
            want = model(ids[:, start : start + 2], cache=twin).logits
            again = kvgroups.GroupedCache(model)
            got = model(ids[:, : start + 2], cache=again).logits[:, -2:]
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    vars(model)["_kvgroups"].context.manager.check()


def test_a_kernel_that_computes_wrong_slots_is_named(monkeypatch):
    model = sanitized("gemma3_text")
    original = ops.slot_mapping

    def shifted(*args, **kwargs):
        slots = original(*args, **kwargs)
        return torch.where(slots >= 0, slots + 1, slots)

    monkeypatch.setattr(ops, "slot_mapping", shifted)
    with pytest.raises(SanitizerError, match=r"slots: group '\w+': block \d+: token \d+ of the request in row 0"):
        model.generate(**prompts(), max_new_tokens=2, do_sample=False, pad_token_id=0)
