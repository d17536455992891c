"""A generate that cannot run to its end is refused before it takes a block; one that fits exactly runs."""

import pytest
import torch

import kvgroups
from kvgroups.errors import OutOfBlocksError, UnsupportedCallError
from kvgroups.testing import tiny

FAMILIES = [pytest.param("llama", marks=pytest.mark.slow), "gemma3_text", "bamba"]


def prompts(*lengths: int, seed: int = 0) -> dict[str, torch.Tensor]:
    width = max(lengths)
    ids = torch.randint(3, 97, (len(lengths), width), generator=torch.Generator().manual_seed(seed))
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    return {"input_ids": ids, "attention_mask": mask}


def manager_of(model):
    return vars(model)["_kvgroups"].context.manager


def repatch(model, **overrides) -> None:
    kvgroups.unpatch(model)
    kvgroups.patch(model, kvgroups.infer_config(model, **overrides))


def run(model, inputs, **options):
    options = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True, **options}
    torch.manual_seed(0)
    return model.generate(**inputs, **options)


def assert_exact(family, life, turns=1, **overrides) -> None:
    """What `life` of a model with all memory held at its peak is what it runs in; with one block less of any group
    its last generate is refused, and what was held before is what is held after.

    `life` yields once, with what it holds, before that generate, and then the answer; the generate is the last of
    `turns`.
    """
    model = tiny(family)
    repatch(model, **overrides)
    *_, want = life(model)
    peak = {group.name: group.peak_held_bytes // group.block_bytes for group in manager_of(model).usage().groups}
    repatch(model, memory=peak, **overrides)
    *_, got = life(model)
    assert torch.equal(got, want)
    for name in [name for name, blocks in peak.items() if blocks > 1]:
        repatch(model, memory={**peak, name: peak[name] - 1}, **overrides)
        steps = life(model)
        if name == "state" and turns > 1:
            with pytest.raises(OutOfBlocksError, match="group 'state': "):
                next(steps)  # the first turn needs as many already
            continue
        caches = next(steps)
        held = manager_of(model).usage().held_bytes
        with pytest.raises(OutOfBlocksError, match=f"group '{name}': .* requests of up to"):
            next(steps)
        assert manager_of(model).usage().held_bytes == held
        manager_of(model).check()
        del caches


def one_turn(inputs, **options):
    def life(model):
        yield None
        yield run(model, inputs, **options).sequences

    return life


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        pytest.param((13,), {}, marks=pytest.mark.slow),
        ((13,), {"max_new_tokens": 1}),
        ((3, 21, 14), {}),
        ((3, 21, 14), {"prefill_chunk_size": 5}),
        ((22,), {"do_sample": True, "num_return_sequences": 3}),
        ((22, 17), {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4}),
    ],
    ids=["one", "one token", "ragged", "chunks", "samples", "few samples"],
)
def test_what_fits_exactly(family, lengths, options):
    assert_exact(family, one_turn(prompts(*lengths), **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_of_few_tokens(family):
    assert_exact(family, one_turn(prompts(9, 23)), max_num_batched_tokens=8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(12,), (12, 5)], ids=["one", "ragged"])
def test_a_second_turn(family, lengths):
    """The cache's own blocks are part of what its next turn needs."""

    def life(model):
        inputs = prompts(*lengths)
        first = run(model, inputs, max_new_tokens=6)
        more = prompts(*[7] * len(lengths), seed=1)["input_ids"]
        ids = torch.cat((first.sequences, more), dim=1)
        mask = torch.cat((inputs["attention_mask"], torch.ones(len(ids), 6 + 7, dtype=torch.long)), dim=1)
        yield first.cache
        yield run(model, {"input_ids": ids, "attention_mask": mask}, cache=first.cache).sequences

    assert_exact(family, life, turns=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_cache_holds_blocks(family):
    def life(model):
        other = kvgroups.GroupedCache(model)
        with torch.no_grad():
            model(prompts(19)["input_ids"], cache=other)
        yield other
        yield run(model, prompts(13, 7)).sequences

    assert_exact(family, life)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_refusal_names_what_other_caches_hold(family):
    model = tiny(family)
    blocks = {"full": 5, "window": 40, "state": 3}
    memory = {group.name: blocks[group.name] for group in kvgroups.infer_config(model).groups}
    repatch(model, memory=memory)
    other = kvgroups.GroupedCache(model)
    with torch.no_grad():
        model(prompts(40)["input_ids"], cache=other)
    usage = manager_of(model).usage().held_bytes
    with pytest.raises(OutOfBlocksError, match=r"group 'full': 1 requests of up to 42 tokens need 3 blocks .* are 5, 3 of"):
        run(model, prompts(13))
    assert manager_of(model).usage().held_bytes == usage
    other.close()
    assert run(model, prompts(13)).sequences.shape == (1, 43)


@pytest.mark.parametrize("family", FAMILIES)
def test_beams(family):
    """Four beams may part at once and never meet again: memory for that is enough, and less is refused."""
    model = tiny(family)
    inputs, options = prompts(13, 6), {"num_beams": 4}
    want = run(model, inputs, **options).sequences
    exact = {"full": 2 * 4 * 3, "window": 2 * 4 * 3, "state": 2 * 4}  # no block of 16 is shared by 13 tokens
    memory = {group.name: exact[group.name] for group in kvgroups.infer_config(model).groups}
    repatch(model, memory=memory)
    assert torch.equal(run(model, inputs, **options).sequences, want)
    for name in memory:
        repatch(model, memory={**memory, name: memory[name] - 1})
        with pytest.raises(OutOfBlocksError, match=f"group '{name}': 8 requests of up to 42 tokens need {memory[name]} "):
            run(model, inputs, **options)
        assert manager_of(model).usage().held_bytes == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes(family):
    """In bytes other caches count by the slabs that they lie in."""
    model = tiny(family)
    repatch(model)
    plan = manager_of(model).plan
    other = kvgroups.GroupedCache(model)
    with torch.no_grad():
        model(prompts(19)["input_ids"], cache=other)
    run(model, prompts(13, 7))
    slabs = plan.num_slabs({g.name: g.peak_held_bytes // g.block_bytes for g in manager_of(model).usage().groups})
    for num_slabs in (slabs, slabs - 1):
        repatch(model, memory=num_slabs * plan.slab_bytes)
        other = kvgroups.GroupedCache(model)
        with torch.no_grad():
            model(prompts(19)["input_ids"], cache=other)
        held = manager_of(model).usage().held_bytes
        if num_slabs == slabs:
            run(model, prompts(13, 7))
        else:
            with pytest.raises(OutOfBlocksError, match="with what other caches hold"):
                run(model, prompts(13, 7))
        assert manager_of(model).usage().held_bytes == held


class TestDrafts:
    PROMPT = torch.tensor([[7, 8, 9, 10, 11, 12] * 4])

    def generate(self, model, prompt=PROMPT, **options):
        options = {"max_new_tokens": 20, "do_sample": False, **options}
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 10}, {"assistant": 20}], ids=["lookup", "assistant"])
    @pytest.mark.parametrize("room", [0, 1])
    def test_near_the_longest_row(self, family, options, room):
        """The answer ends at `max_model_len`: drafts get shorter, and the tokens are those of greedy search."""
        model = tiny(family)
        want = self.generate(model)
        repatch(model, max_model_len=44 + room)
        options = dict(options)
        if options.pop("assistant", None):
            options["assistant_model"] = tiny(family)
        assert torch.equal(self.generate(model, **options), want)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_more_than_64_at_once(self, family):
        """A prompt in which the first match promises 100 tokens that are not what the model says."""
        model = tiny(family)
        prompt = torch.randint(3, 97, (1, 130), generator=torch.Generator().manual_seed(0))
        prompt[0, -2:] = prompt[0, :2]
        want = self.generate(model, prompt)
        kvgroups.patch(model)
        assert torch.equal(self.generate(model, prompt, prompt_lookup_num_tokens=100), want)
        assistant = tiny(family, seed=1)
        assistant.generation_config.num_assistant_tokens = 100
        assert torch.equal(self.generate(model, prompt, assistant_model=assistant, max_new_tokens=150)[:, :150], want)

    def test_an_assistant_whose_drafts_grow(self):
        """Drafts that are always right grow by two a step: they stop where the cache can go back no further."""
        model = tiny("bamba")
        want = self.generate(model, max_new_tokens=250)
        kvgroups.patch(model)
        assistant = tiny("bamba")
        assistant.generation_config.num_assistant_tokens = 60
        assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
        assert torch.equal(self.generate(model, assistant_model=assistant, max_new_tokens=250), want)

    @pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 10}, {"assistant": 20}], ids=["lookup", "assistant"])
    def test_a_ring_that_is_too_small(self, options):
        """W = 8 on blocks of 4: two blocks keep one token beyond the window."""
        model = tiny("gemma3_text")
        want = self.generate(model)
        repatch(model, slot_mapping={"window": "ring"})
        options = dict(options)
        num_drafts = options.get("prompt_lookup_num_tokens", 20)
        if options.pop("assistant", None):
            options["assistant_model"] = tiny("gemma3_text", seed=1)
        with pytest.raises(UnsupportedCallError, match=f"max_rewind: {num_drafts} tokens, and a ring keeps 1 beyond"):
            self.generate(model, **options)
        assert manager_of(model).usage().held_bytes == 0
        repatch(model, slot_mapping={"window": "ring"}, max_rewind=num_drafts)
        assert torch.equal(self.generate(model, **options), want)

    def test_a_ring_and_a_cache_made_by_hand(self):
        model = tiny("gemma3_text")
        repatch(model, slot_mapping={"window": "ring"})
        kvgroups.GroupedCache(model, max_rewind=1)
        with pytest.raises(UnsupportedCallError, match="max_rewind: 2 tokens, and a ring keeps 1"):
            kvgroups.GroupedCache(model, max_rewind=2)

    def test_a_cache_that_holds_tokens(self):
        """transformers would feed it the whole prompt a second time."""
        model = kvgroups.patch(tiny("llama"))
        first = self.generate(model, return_dict_in_generate=True)
        ids = torch.cat((first.sequences, self.PROMPT), dim=1)
        with pytest.raises(UnsupportedCallError, match="cache: holds 43 tokens .* prompt_lookup_num_tokens"):
            self.generate(model, ids, cache=first.cache, prompt_lookup_num_tokens=3)
        assert first.cache.num_tokens == [43]
        self.generate(model, ids, cache=first.cache)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_memory_for_drafts(self, family):
        """What is admitted never runs out on the way; what could is refused before it starts."""
        model = tiny(family)
        want = self.generate(model)
        groups = [group.name for group in kvgroups.infer_config(model).groups]
        need = {"full": 3, "state": 2}
        for window in range(4, 30):
            memory = {name: need.get(name, window) for name in groups}
            repatch(model, memory=memory)
            try:
                assert torch.equal(self.generate(model, prompt_lookup_num_tokens=4), want)
            except OutOfBlocksError as error:
                assert "group 'window': 1 requests of up to 43 tokens" in str(error)
                assert manager_of(model).usage().held_bytes == 0
            else:
                break
        else:
            pytest.fail("nothing is enough")
        repatch(model, memory={**memory, "full": 2})
        with pytest.raises(OutOfBlocksError, match="group 'full': 1 requests .* need 3 blocks"):
            self.generate(model, prompt_lookup_num_tokens=4)
