"""The rule itself, on made-up logits: what passes, what fails, and what is only remarked."""

from __future__ import annotations

import pytest
import torch

from kvgroups.parity.judge import TOLERANCE, Finding, Judge
from kvgroups.parity.oracle import max_difference
from kvgroups.parity.row import Row

GAP = 1e-4
REFERENCE = torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
"""Two steps over a vocabulary of three: the choices are 2 and 0."""


class MadeUpOracle:
    """Says what it is told to."""

    def __init__(self, uncached, cached=None, continues=True):
        self.answers = {"uncached": uncached, "cached": uncached if cached is None else cached}
        self.continues = continues

    def uncached(self, row):
        return self.answers["uncached"]

    def cached(self, row):
        return self.answers["cached"]

    def continues_exactly(self, row, tolerance):
        return self.continues

    def gap(self, row):
        return GAP


def row(logits=REFERENCE, answer=(2, 0), pieces=(4,), score=None):
    return Row(prompt=(1, 1, 1, 1), answer=answer, logits=logits, pieces=pieces, score=score)


def made_up_judge(oracle=None, dtype=torch.float32):
    judge = Judge(oracle or MadeUpOracle(REFERENCE), [row()], dtype)
    judge.gap, judge.tolerance = GAP, TOLERANCE * GAP
    return judge


def judge(ours, eager=None, *, oracle=None, dtype=torch.float32, **options):
    return made_up_judge(oracle, dtype).judge([ours], None if eager is None else [eager], **options)


def test_the_same_tokens_and_logits_pass():
    finding = judge(row(), row())
    assert (finding.failures, finding.remarks) == ([], [])
    assert (finding.tokens, finding.tokens_agree, finding.eager_tokens_agree) == (2, 2, 2)


@pytest.mark.parametrize(("factor", "fails"), [(0.9, False), (1.1, True)])
def test_logits_may_move_by_the_tolerance_and_not_by_more(factor, fails):
    finding = judge(row(REFERENCE + factor * TOLERANCE * GAP))
    assert bool(finding.failures) == fails


def test_another_token_fails_in_float32_even_at_a_near_tie():
    tie = torch.tensor([[0.0, 2.0 - GAP / 2, 2.0], [2.0, 1.0, 0.0]])
    finding = judge(row(tie, answer=(1, 0)), oracle=MadeUpOracle(tie))
    assert finding.failures == ["row 0: token 0 is 1, the reference chooses 2 by 5.0e-05, allowed 0"]


def test_equal_logits_are_a_tie_in_float32_too():
    tie = torch.tensor([[0.0, 2.0, 2.0], [2.0, 1.0, 0.0]])
    finding = judge(row(tie, answer=(2, 0)), oracle=MadeUpOracle(tie))
    assert (finding.failures, finding.tokens_agree, finding.near_ties) == ([], 1, 1)
    tie[0, 1] = tie[0, 1].nextafter(torch.tensor(3.0))
    assert judge(row(tie, answer=(2, 0)), oracle=MadeUpOracle(tie)).failures != []


@pytest.mark.parametrize(("margin", "fails"), [(0.5 * GAP, False), (2 * GAP, True)])
def test_in_low_precision_a_margin_below_eagers_own_gap_is_a_tie(margin, fails):
    tie = torch.tensor([[0.0, 2.0 - margin, 2.0], [2.0, 1.0, 0.0]])
    finding = judge(row(tie, answer=(1, 0)), oracle=MadeUpOracle(tie), dtype=torch.bfloat16)
    said = ["row 0: token 0 is 1, the reference chooses 2 by 2.0e-04, allowed less than 1.0e-04"]
    assert finding.failures == (said if fails else [])
    assert (finding.tokens_agree, finding.near_ties) == (1, 0 if fails else 1)


def test_eager_that_is_off_the_oracle_is_remarked_and_does_not_fail_us():
    finding = judge(row(), row(REFERENCE.flip(0), answer=(0, 2)))
    assert finding.failures == []
    assert finding.eager_difference == 2.0
    assert "off its own uncached forward by 2.0e+00" in finding.remarks[0]
    assert "chooses another token 0" in finding.remarks[0]


def test_eager_is_compared_up_to_where_tokens_part():
    """After another token both read different texts, and their logits say nothing about each other."""
    later = torch.stack([REFERENCE[0], torch.tensor([0.0, 2.0, 9.0])])
    assert judge(row(), row(later, answer=(1, 2))).eager_difference == 0.0
    assert judge(row(), row(later, answer=(2, 2))).eager_difference == 9.0


def test_eagers_cached_decode_is_the_reference_where_it_is_off_its_uncached_forward():
    cached = REFERENCE + 0.1
    finding = judge(row(cached), row(cached), oracle=MadeUpOracle(REFERENCE, cached))
    assert (finding.failures, finding.reference) == ([], "cached")
    assert finding.cached_gap == pytest.approx(0.1)


def test_being_off_both_references_fails():
    finding = judge(row(REFERENCE - 0.1), oracle=MadeUpOracle(REFERENCE, REFERENCE + 0.1))
    assert finding.reference == "uncached" and finding.failures


def test_a_prompt_in_pieces_is_excused_only_if_eager_takes_pieces():
    cached = REFERENCE + 0.1
    in_pieces = row(cached, pieces=(2, 2))
    assert judge(in_pieces, oracle=MadeUpOracle(REFERENCE, cached, continues=True)).failures == []
    assert judge(in_pieces, oracle=MadeUpOracle(REFERENCE, cached, continues=False)).failures != []


def test_samples_are_held_against_eagers_draw():
    assert judge(row(answer=(0, 1)), row(answer=(0, 1)), decoding="sampled").failures == []
    finding = judge(row(answer=(0, 1)), row(answer=(0, 2)), decoding="sampled")
    assert finding.failures == ["row 0: sampled token 1 is 1, eager draws 2"]


BEAM = (1, 1)
"""No token of it is a choice, as a beam's need not be."""


def test_beams_are_held_against_eagers_beams_and_their_scores():
    def failures(score, answer=BEAM):
        return judge(row(answer=BEAM, score=-1.0), row(answer=answer, score=score), decoding="beams").failures

    assert failures(-1.0 + 0.9 * TOLERANCE * GAP) == []
    assert failures(-1.1) == ["beam 0: score -1.0, eager's is -1.1"]
    assert failures(None) == ["beam 0: score -1.0, eager's is None"]
    assert failures(-1.0, answer=(1, 2)) == ["beam 0: token 1 is 1, eager's is 2"]


def test_beams_without_a_cache_are_asked_where_the_cached_ones_are_others():
    def held(cached, uncached):
        cached, uncached = (None if beam is None else [row(answer=beam)] for beam in (cached, uncached))
        finding = made_up_judge().judge(
            [row(answer=BEAM)], cached, decoding="beams", uncached=lambda: uncached
        )
        return bool(finding.failures), bool(finding.remarks)

    assert held((1, 1), None) == (False, False)
    assert held((1, 2), (1, 1)) == (False, True)
    assert held((1, 2), (2, 2)) == (True, False)
    assert held(None, (1, 1)) == (False, True)
    assert held(None, None) == (True, False)


def test_drafts_may_be_as_far_off_as_eagers_decode_is_by_design():
    by_design = MadeUpOracle(REFERENCE, REFERENCE + 0.1)
    between, beyond = row(REFERENCE + 0.05), row(REFERENCE - 0.05)

    finding = judge(between, oracle=by_design, is_mixed=True)
    assert (finding.failures, finding.reference) == ([], "cached")
    assert finding.allowed == pytest.approx(0.1 + TOLERANCE * GAP)
    assert judge(between, oracle=by_design).failures != []
    assert judge(beyond, oracle=by_design, is_mixed=True).failures != []
    # Where both references agree there is nothing to excuse.
    assert judge(between, oracle=MadeUpOracle(REFERENCE), is_mixed=True).failures != []


@pytest.mark.parametrize(
    ("other", "dtype", "failures"),
    [
        (row(), torch.float32, []),
        (row(REFERENCE + 2 * TOLERANCE * GAP), torch.float32, ["logits off those of generic by 6.4e-03"]),
        (row(answer=(2, 1)), torch.float32, ["token 1 is 0, generic chooses 1"]),
        (row(answer=(2, 1)), torch.bfloat16, []),  # the reference decides who is right
        (row(torch.stack([REFERENCE[0], REFERENCE[1] + 9]), answer=(1, 0)), torch.bfloat16, []),
    ],
    ids=[
        "same",
        "other logits",
        "another token",
        "another token in bfloat16",
        "other logits after another token",
    ],
)
def test_another_form_is_compared_until_tokens_part(other, dtype, failures):
    finding = Finding()
    made_up_judge(dtype=dtype).hold(finding, [row()], [other], "generic")
    assert len(finding.failures) == len(failures)
    assert all(want in got for want, got in zip(failures, finding.failures, strict=True))


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ([1.0, float("-inf")], [1.5, float("-inf")], 0.5),
        ([float("-inf")], [0.0], float("inf")),
        ([float("nan")], [float("nan")], float("inf")),
    ],
)
def test_infinities_are_equal_and_nan_is_never(one, other, difference):
    assert max_difference(torch.tensor(one), torch.tensor(other)) == difference
