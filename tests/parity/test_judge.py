"""The rule itself, on made-up logits: what passes, what fails, and what is only remarked."""

from __future__ import annotations

import pytest
import torch

from kvgroups.parity.judge import TOLERANCE, Judge
from kvgroups.parity.oracle import max_difference
from kvgroups.parity.sides import Row

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


def row(logits=REFERENCE, answer=(2, 0), pieces=(4,)):
    return Row(prompt=(1, 1, 1, 1), answer=answer, logits=logits, pieces=pieces)


def judge(ours, eager=None, *, oracle=None, dtype=torch.float32, is_sampled=False):
    judge = Judge(oracle or MadeUpOracle(REFERENCE), [row()], dtype)
    judge.gap, judge.tolerance = GAP, TOLERANCE * GAP
    return judge.judge([ours], None if eager is None else [eager], is_sampled=is_sampled)


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
    assert finding.failures == ["row 0: token 0 is 1, the reference chooses 2 by 5.0e-05"]


@pytest.mark.parametrize(("margin", "fails"), [(0.5 * GAP, False), (2 * GAP, True)])
def test_in_low_precision_a_margin_below_eagers_own_gap_is_a_tie(margin, fails):
    tie = torch.tensor([[0.0, 2.0 - margin, 2.0], [2.0, 1.0, 0.0]])
    finding = judge(row(tie, answer=(1, 0)), oracle=MadeUpOracle(tie), dtype=torch.bfloat16)
    assert bool(finding.failures) == fails
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
    assert judge(row(answer=(0, 1)), row(answer=(0, 1)), is_sampled=True).failures == []
    finding = judge(row(answer=(0, 1)), row(answer=(0, 2)), is_sampled=True)
    assert finding.failures == ["row 0: sampled token 1 is 1, eager draws 2"]


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
