"""`model.generate` on a patched model: the tokens are those of the unpatched one, however it is called."""

import pytest
import torch
from transformers import DynamicCache, TextIteratorStreamer, TextStreamer, pipeline

import kvgroups
from kvgroups.testing import tiny
from kvgroups.testing.oracle import oracle_logits, poison_free_blocks, without_dt_floor

TOLERANCE = 1e-4


@pytest.fixture
def plain(family):
    return tiny(family)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]


def left_padded(rows: list[list[int]], to: int | None = None) -> dict[str, torch.Tensor]:
    """Rows padded on the left with an ordinary token, so that a leak shows."""
    width = to or max(map(len, rows))
    return {
        "input_ids": torch.tensor([[5] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def run(model, inputs, **options):
    options = {"max_new_tokens": 20, "do_sample": False, **options}
    return model.generate(**inputs, return_dict_in_generate=True, output_logits=True, **options)


def assert_oracle(model, prompt: list[int], answer: list[int], logits: list[torch.Tensor]) -> None:
    """Each token is the argmax of one uncached forward over the row alone, and the logits agree."""
    want = oracle_logits(model, prompt + answer[:-1])[len(prompt) - 1 :]
    got = torch.stack(logits)
    assert (got - want).abs().max().item() < TOLERANCE * want.abs().max().item()
    assert answer == want.argmax(-1).tolist()


def assert_nothing_held(model) -> None:
    manager = model._kvgroups.context.manager
    manager.check()
    assert manager.usage().held_bytes == 0


def has_exact_decode(family: str) -> bool:
    """Zamba2 and Nemotron-H floor dt in prefill only, so their decode is held against eager's cached decode."""
    return family not in ("zamba2", "nemotron_h")


def test_a_ragged_batch_gives_what_each_row_gives_alone(family, plain):
    """Prompts of W-1, W, W+1, 2W+5 and 1 tokens, padded left, in one batch."""
    rows = prompts(7, 8, 9, 21, 1)
    alone = [run(plain, left_padded([row])).sequences[0, len(row) :].tolist() for row in rows]
    model = kvgroups.patch(plain)
    poison_free_blocks(model)
    output = run(model, left_padded(rows))
    for index, row in enumerate(rows):
        answer = output.sequences[index, 21:].tolist()
        assert answer == alone[index]
        if has_exact_decode(family):
            assert_oracle(model, row, answer, [step[index] for step in output.logits])
    del output
    assert_nothing_held(model)


def test_logits_are_eagers(family, plain):
    """Against eager's own cached decode, step by step, for a batch without padding."""
    inputs = left_padded(prompts(12, 12))
    want = run(plain, inputs)
    got = run(kvgroups.patch(plain), inputs)
    assert torch.equal(got.sequences, want.sequences)
    for step, other in zip(got.logits, want.logits, strict=True):
        assert (step - other).abs().max().item() < TOLERANCE * other.abs().max().item()


def test_a_batch_of_one_with_padding(plain):
    (row,) = prompts(10)
    want = run(plain, left_padded([row])).sequences[0, 10:]
    got = run(kvgroups.patch(plain), left_padded([row], to=17)).sequences[0, 17:]
    assert torch.equal(got, want)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 8, 9, 16, 29, 30])
def test_prefill_chunks(plain, chunk):
    """30 tokens in chunks of every awkward size: below, at and above the block and the window."""
    (row,) = prompts(30)
    want = run(plain, left_padded([row]))
    got = run(kvgroups.patch(plain), left_padded([row]), prefill_chunk_size=chunk)
    assert torch.equal(got.sequences, want.sequences)


def test_prefill_chunks_of_a_padded_batch(plain):
    """Chunks of 5 over rows of 7 and 18: the first chunk of the short row is all padding."""
    rows = prompts(7, 18)
    want = [run(plain, left_padded([row])).sequences[0, len(row) :] for row in rows]
    got = run(kvgroups.patch(plain), left_padded(rows), prefill_chunk_size=5).sequences[:, 18:]
    for answer, alone in zip(got, want, strict=True):
        assert torch.equal(answer, alone)


def test_samples_with_one_seed(plain):
    inputs = left_padded(prompts(7, 13))
    options = {"do_sample": True, "num_return_sequences": 3, "temperature": 0.8, "top_k": 20}
    torch.manual_seed(3)
    want = run(plain, inputs, **options).sequences
    kvgroups.patch(plain)
    torch.manual_seed(3)
    assert torch.equal(run(plain, inputs, **options).sequences, want)
    assert len({tuple(row) for row in want.tolist()}) > 2  # the seed really drew different samples


def test_several_calls_in_a_row(plain):
    """Three batches one after the other on one patched model: nothing of one is left for the next."""
    batches = [prompts(3, 11, 8), prompts(20), prompts(9, 2)]
    want = [[run(plain, left_padded([row])).sequences[0, len(row) :].tolist() for row in rows] for rows in batches]
    model = kvgroups.patch(plain)
    for rows, alone in zip(batches, want, strict=True):
        poison_free_blocks(model)
        got = run(model, left_padded(rows)).sequences[:, max(map(len, rows)) :].tolist()
        assert got == alone
        assert_nothing_held(model)


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_identical_prompts_give_one_answer(plain, count):
    rows = prompts(11) * count
    answers = run(kvgroups.patch(plain), left_padded(rows)).sequences.tolist()
    assert len({tuple(answer) for answer in answers}) == 1


def test_a_second_turn_on_a_returned_cache(family, fused):
    """Two rows, the shorter one padded; then five more tokens each on the cache that came back."""
    model = kvgroups.patch(without_dt_floor(tiny(family)), fused=fused)
    rows = prompts(9, 14)
    first = run(model, left_padded(rows), max_new_tokens=6)
    more = torch.tensor(prompts(5, 5))
    ids = torch.cat((first.sequences, more), dim=1)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    poison_free_blocks(model)
    second = run(model, {"input_ids": ids, "attention_mask": mask}, cache=first.cache, max_new_tokens=8)
    assert second.cache is first.cache
    for index, start in enumerate((5, 0)):
        whole = ids[index, start:].tolist()
        answer = second.sequences[index, ids.shape[1] :].tolist()
        assert_oracle(model, whole, answer, [step[index] for step in second.logits])
    del first, second
    assert_nothing_held(model)


@pytest.mark.parametrize("family", ["gemma3_text", "bamba"])
class TestFaces:
    """What stands around generate: streamers and pipelines see the same tokens."""

    @pytest.fixture
    def tokenizer(self):
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = {f"w{index}": index for index in range(97)}
        backend = Tokenizer(models.WordLevel(words, unk_token="w3"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w5", padding_side="left")

    def test_streamer(self, plain, tokenizer):
        inputs = left_padded(prompts(6))
        want = tokenizer.decode(run(plain, inputs).sequences[0])
        streamer = TextIteratorStreamer(tokenizer)
        run(kvgroups.patch(plain), inputs, streamer=streamer)
        assert "".join(streamer) == want

    def test_streamer_that_prints(self, plain, tokenizer, capsys):
        output = run(kvgroups.patch(plain), left_padded(prompts(6)), streamer=TextStreamer(tokenizer))
        assert capsys.readouterr().out.strip() == tokenizer.decode(output.sequences[0])

    def test_text_generation_pipeline(self, plain, tokenizer):
        texts = ["w7 w8 w9", "w10 w11 w12 w13 w14 w15 w16 w17 w18 w19 w20", "w21"]
        options = {"max_new_tokens": 12, "do_sample": False, "batch_size": 3}
        want = pipeline("text-generation", model=plain, tokenizer=tokenizer)(texts, **options)
        got = pipeline("text-generation", model=kvgroups.patch(plain), tokenizer=tokenizer)(texts, **options)
        assert got == want
        assert_nothing_held(plain)

    def test_embeddings_instead_of_ids(self, plain, family):
        if family == "bamba":
            pytest.skip("transformers does not forward inputs_embeds for this family")
        (row,) = prompts(9)
        embeddings = plain.get_input_embeddings()(torch.tensor([row]))
        want = plain.generate(inputs_embeds=embeddings, max_new_tokens=8, do_sample=False)
        got = kvgroups.patch(plain).generate(inputs_embeds=embeddings, max_new_tokens=8, do_sample=False)
        assert torch.equal(got, want)

    def test_a_stop_token_ends_one_row(self, plain):
        """Row 0 stops early and is filled with pads; row 1 goes on as if nothing had happened."""
        rows = prompts(6, 6)
        free = run(plain, left_padded(rows)).sequences[:, 6:]
        stop = free[0, 3].item()
        options = {"eos_token_id": stop, "pad_token_id": 5}
        want = run(plain, left_padded(rows), **options).sequences
        assert torch.equal(run(kvgroups.patch(plain), left_padded(rows), **options).sequences, want)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "mistral"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("block_size", "slot_mapping"),
    [(3, "paged"), (16, "paged"), (1, "token"), (4, "ring"), (3, "ring"), (16, "ring")],
)
def test_every_way_to_lay_out_a_window(plain, block_size, slot_mapping, layout):
    """W = 8 in blocks that do not divide it, exceed it or hold one token; in pages and in rings."""
    config = kvgroups.infer_config(
        plain, block_size={"window": block_size}, slot_mapping={"window": slot_mapping}, layout=layout
    )
    rows = prompts(21, 6)
    want = [run(plain, left_padded([row])).sequences[0, len(row) :] for row in rows]
    model = kvgroups.patch(plain, config)
    for chunk in (None, 5):
        poison_free_blocks(model)
        got = run(model, left_padded(rows), prefill_chunk_size=chunk).sequences[:, 21:]
        for answer, alone in zip(got, want, strict=True):
            assert torch.equal(answer, alone)
    assert_nothing_held(model)


@pytest.mark.parametrize("family", ["gemma3_text"])
def test_a_window_holds_only_what_can_be_seen(plain):
    """200 tokens on W = 8 in blocks of 4, 50 blocks if all were kept, fed 25 at a time: during a chunk the window
    holds the 7 tokens that its first query sees and the 7 that the next chunk's will, three blocks each."""
    model = kvgroups.patch(plain)
    (row,) = prompts(200)
    cache = kvgroups.GroupedCache(model)
    held = {"window": set(), "full": set()}
    with torch.no_grad():
        for start in range(0, 200, 25):
            model(torch.tensor([row[start : start + 25]]), cache=cache)
            for group in model._kvgroups.context.manager.usage().groups:
                held[group.name].add(group.num_used)
    assert max(held["full"]) == 13
    assert max(held["window"]) == 6


@pytest.mark.parametrize("family", ["bamba", "qwen3_next"])
def test_bfloat16_keeps_recurrent_states_in_float32(family):
    model = kvgroups.patch(tiny(family, dtype=torch.bfloat16))
    (state,) = [g.spec for g in model._kvgroups.context.config.groups if g.is_state]
    assert {s.name: s.dtype for s in state.states} == {"conv": "bfloat16", "recurrent": "float32"}
    answers = run(model, left_padded(prompts(11) * 4)).sequences.tolist()
    assert len({tuple(answer) for answer in answers}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("family", ["bamba", "jamba", "falcon_h1", "qwen3_next"])
def test_bfloat16_drifts_no_more_than_eager(family, fused):
    """200 tokens decoded one by one in bfloat16, the same tokens for all: the distance to the float32 model, as a root
    mean square over the logits, is at most a tenth above that of eager's own bfloat16 decode. (The largest distance
    moves by a sixth either way with the order of a sum.)"""
    tokens = torch.tensor(prompts(204))
    exact = oracle_logits(tiny(family), tokens[0])

    def drift(model, cache):
        with torch.no_grad():
            logits = [model(tokens[:, :4], cache=cache).logits]
            for at in range(4, 204):
                positions = torch.tensor([[at]])
                logits.append(model(tokens[:, at : at + 1], cache=cache, position_ids=positions).logits)
        return (torch.cat(logits, dim=1)[0].float() - exact).square().mean().sqrt().item()

    model = tiny(family, dtype=torch.bfloat16)
    eager = drift(model, DynamicCache(config=model.config))
    kvgroups.patch(model, fused=fused)
    assert drift(model, kvgroups.GroupedCache(model)) <= 1.1 * eager
