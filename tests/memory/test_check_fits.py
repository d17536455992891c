"""`check_fits` and `allocate` are one arithmetic: what the first admits, the second never refuses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgroups.errors import OutOfBlocksError

sizes = st.integers(1, 12)
block_sizes = st.integers(1, 6)
groups = st.fixed_dictionaries(
    {},
    optional={
        "full": st.tuples(block_sizes),
        "window": st.tuples(sizes, block_sizes),
        "window_b": st.tuples(sizes, block_sizes),
        "ring": st.tuples(sizes, block_sizes),
        "chunk": st.tuples(sizes, block_sizes),
        "state": st.just(()),
    },
).filter(bool)


@st.composite
def workloads(draw):
    """`(paddings, prompt_len, max_len, chunk_size)`, every prompt of one token at least."""
    prompt_len = draw(st.integers(1, 40))
    paddings = draw(st.lists(st.integers(0, prompt_len - 1), min_size=1, max_size=4))
    max_len = prompt_len + draw(st.integers(0, 40))
    chunk_size = draw(st.none() | st.integers(1, prompt_len))
    return paddings, prompt_len, max_len, chunk_size


def run(bench, paddings, prompt_len, max_len, chunk_size) -> dict[str, int]:
    """Prefill and decode all rows side by side; the most blocks that each group has held at once."""
    requests = [bench.open(row) for row in range(len(paddings))]
    peaks = bench.num_used()
    chunk = chunk_size or prompt_len
    starts = [*range(0, prompt_len, chunk), *range(prompt_len, max_len)]
    for start, stop in zip(starts, [*starts[1:], max_len], strict=True):
        # A chunk of left-padded prompts: the tokens of the row that lie in these columns.
        counts = [max(0, stop - pad) - max(0, start - pad) for pad in paddings]
        bench.manager.allocate(requests, counts)
        peaks = {name: max(used, peaks[name]) for name, used in bench.num_used().items()}
        bench.manager.advance(requests, counts)
    bench.manager.check()
    return peaks


def is_admitted(bench, paddings, prompt_len, max_len, chunk_size) -> bool:
    before = bench.snapshot()
    try:
        bench.manager.check_fits(len(paddings), prompt_len, max_len, chunk_size, padding=paddings)
    except OutOfBlocksError:
        return False
    finally:
        assert bench.snapshot() == before
    return True


@given(groups=groups, workload=workloads(), max_rewind=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_equal_requests_are_admitted_exactly_when_they_fit(make_bench, groups, workload, max_rewind):
    paddings, prompt_len, max_len, chunk_size = workload
    workload = [0] * len(paddings), prompt_len, max_len, chunk_size
    peaks = run(make_bench(groups, max_rewind=max_rewind), *workload)
    memory = {name: max(1, peak) for name, peak in peaks.items()}

    bench = make_bench(groups, max_rewind=max_rewind, memory=memory)
    assert is_admitted(bench, *workload)
    assert run(bench, *workload) == peaks
    for name in memory:
        if memory[name] > 1:
            short = make_bench(groups, max_rewind=max_rewind, memory={**memory, name: memory[name] - 1})
            assert not is_admitted(short, *workload), name
            with pytest.raises(OutOfBlocksError, match=f"group '{name}'"):
                run(short, *workload)


@given(groups=groups, workload=workloads(), max_rewind=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_padded_requests_that_are_admitted_run_to_the_end(make_bench, groups, workload, max_rewind):
    paddings, prompt_len, max_len, chunk_size = workload
    peaks = run(make_bench(groups, max_rewind=max_rewind), *workload)
    alone = {name: 0 for name in groups}
    for pad in paddings:
        peak = run(make_bench(groups, max_rewind=max_rewind), [pad], prompt_len, max_len, chunk_size)
        alone = {name: alone[name] + peak[name] for name in groups}
    # Rows need not peak in the same step, so their sum is enough, and it is what is asked for.
    assert all(peaks[name] <= alone[name] for name in groups)
    bench = make_bench(
        groups, max_rewind=max_rewind, memory={name: max(1, count) for name, count in alone.items()}
    )
    assert is_admitted(bench, *workload)
    run(bench, *workload)


@given(groups=groups, workload=workloads(), max_rewind=st.integers(0, 5), state_floats=st.sampled_from([1, 1280]))
@settings(max_examples=40, deadline=None)
def test_a_budget_of_exactly_the_need_is_enough_and_one_byte_less_is_refused(
    make_bench, groups, workload, max_rewind, state_floats
):
    """Several groups in one arena, with states that share slabs with tokens or take runs of five slabs."""
    groups = {name: (state_floats,) if name == "state" else sizes for name, sizes in groups.items()}
    paddings, prompt_len, max_len, chunk_size = workload
    workload = [0] * len(paddings), prompt_len, max_len, chunk_size
    free = make_bench(groups, max_rewind=max_rewind)
    peaks = run(free, *workload)
    plan = free.manager.plan
    need, least = plan.num_slabs(peaks), plan.num_slabs(dict.fromkeys(groups, 1))  # of which a window may use none

    bench = make_bench(groups, max_rewind=max_rewind, memory=max(need, least) * plan.slab_bytes)
    assert is_admitted(bench, *workload)
    assert run(bench, *workload) == peaks
    assert bench.manager.usage().allocated_bytes == bench.config.memory
    if need > least:
        assert not is_admitted(
            make_bench(groups, max_rewind=max_rewind, memory=need * plan.slab_bytes - 1), *workload
        )


def test_a_refusal_names_the_group_the_need_and_what_there_is(make_bench):
    bench = make_bench({"full": (16,), "state": ()}, memory={"full": 7, "state": 2})
    bench.manager.check_fits(2, 30, 48)
    with pytest.raises(
        OutOfBlocksError,
        match="group 'full': 2 requests of up to 49 tokens need 8 blocks of 16 tokens and there are 7; "
        "raise the config's `memory`, or pass fewer or shorter requests",
    ):
        bench.manager.check_fits(2, 30, 49)
    with pytest.raises(OutOfBlocksError, match="group 'state': 3 requests .* need 3 .* there are 2"):
        bench.manager.check_fits(3, 5, 16)


def test_a_refusal_in_bytes_names_the_largest_group(make_bench):
    """Slabs of four blocks of 256 bytes: 5 blocks of full attention, one state and the null slab take 4."""
    bench = make_bench({"full": (16,), "state": ()}, memory=4 * 1024)
    bench.manager.check_fits(1, 30, 128)
    with pytest.raises(
        OutOfBlocksError,
        match=r"memory: 1 requests of up to 129 tokens need 5120 bytes \(5 KiB\) \(group 'full': 9 blocks\) and "
        r"there are 4096 bytes \(4 KiB\); raise the config's `memory`, or pass fewer or shorter requests",
    ):
        bench.manager.check_fits(1, 30, 129)


def test_pools_without_a_limit_admit_everything(make_bench):
    make_bench({"full": (16,)}).manager.check_fits(1000, 10_000, 1_000_000)


def test_a_shorter_prompt_can_need_more_of_a_window(make_bench):
    """W = 8 on blocks of 4: after 31 tokens two blocks are seen, after 30 of them three."""
    bench = make_bench({"window": (8, 4)}, memory={"window": 4})
    bench.manager.check_fits(2, 31, 31)
    with pytest.raises(OutOfBlocksError, match="need 5 blocks"):
        bench.manager.check_fits(2, 31, 31, padding=[0, 1])


def test_chunks_that_begin_inside_blocks_are_looked_at_for_a_whole_period(make_bench):
    """Chunks of 5 on blocks of 3: the second chunk, 5 to 9, is in blocks 1 to 3, the others in two each."""
    bench = make_bench({"chunk": (5, 3)}, memory={"chunk": 2})
    bench.manager.check_fits(1, 1, 9)
    with pytest.raises(OutOfBlocksError, match="need 3 blocks"):
        bench.manager.check_fits(1, 1, 15)


@pytest.mark.parametrize(
    ("group", "sizes", "prompt_len", "max_len", "chunk", "drafted", "blocks"),
    [
        pytest.param("full", (16,), 30, 48, None, 0, 3, id="full: 48 tokens fill three blocks"),
        pytest.param("full", (16,), 30, 49, None, 0, 4, id="full: 49 begin a fourth"),
        pytest.param("full", (16,), 30, 46, None, 3, 4, id="full: the last step feeds three drafts too, to 49"),
        pytest.param("window", (8, 4), 30, 30, None, 0, 3, id="window: the query at 30 sees 23 to 29, in 5, 6 and 7"),
        pytest.param("window", (8, 4), 31, 31, None, 0, 2, id="window: the query at 31 sees 24 to 30"),
        pytest.param("window", (8, 4), 64, 64, 16, 0, 4, id="window: 9 to 15, and 25 to 31 of the next chunk"),
        pytest.param("window", (8, 4), 31, 40, None, 0, 3, id="window: decoding on, three at the most"),
        pytest.param("chunk", (8, 4), 32, 32, None, 0, 0, id="chunk: of a prompt that ends with it nothing is seen"),
        pytest.param("chunk", (8, 4), 32, 40, None, 0, 2, id="chunk: the next one fills two blocks"),
        pytest.param("ring", (10, 4), 1, 1, None, 0, 3, id="ring: three blocks from its first token on"),
        pytest.param("ring", (10, 4), 300, 400, None, 0, 3, id="ring: and three for good"),
        pytest.param("state", (), 300, 400, None, 0, 1, id="state: one"),
        pytest.param("state", (), 300, 400, None, 3, 2, id="state: and a checkpoint"),
    ],
)  # fmt: skip
def test_what_one_request_needs_at_its_peak(make_bench, group, sizes, prompt_len, max_len, chunk, drafted, blocks):
    """With exactly that many blocks it is admitted, and with one less it is refused."""
    if blocks:
        bench = make_bench({group: sizes}, memory={group: blocks})
        bench.manager.check_fits(1, prompt_len, max_len, chunk_size=chunk, max_rewind=drafted)
    if blocks > 1:
        with pytest.raises(OutOfBlocksError, match=f"need {blocks} blocks .* there are {blocks - 1}"):
            make_bench({group: sizes}, memory={group: blocks - 1}).manager.check_fits(
                1, prompt_len, max_len, chunk_size=chunk, max_rewind=drafted
            )
    demand = make_bench({group: sizes}).manager._groups[group].demand
    assert demand.peak_blocks(prompt_len, max_len, chunk, drafted=drafted) == blocks
