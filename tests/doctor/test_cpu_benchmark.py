"""benchmarks/cpu_kernels.py: that it runs, divides what it should, and compares forms that agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import cpu_kernels


@pytest.mark.parametrize("queries, computed, window", [(1, 40, None), (1, 40, 8), (5, 30, None), (20, 0, 8), (20, 0, None)])
def test_all_forms_and_dense_attention_have_one_shape_of_work(queries, computed, window):
    case = cpu_kernels.attention_case((4, 2, 8), torch.float32, batch=2, computed=computed, queries=queries, window=window)
    assert {"dense", "torch"} <= set(case)
    for form in case.values():
        form()


def test_products_are_attention():
    query, key, value = torch.randn(2, 3, 4, 8), *torch.randn(2, 2, 3, 9, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(cpu_kernels._products(query, key, value)(), expected)


def test_ratios_are_those_of_the_medians():
    spins = {"dense": 20_000, "slow": 60_000}
    case = {name: (lambda count=count: sum(range(count))) for name, count in spins.items()}
    found = cpu_kernels.measure(case, rounds=5)
    assert found["dense"]["wall"] == found["dense"]["cpu"] == 1
    assert found["slow"]["cpu"] == pytest.approx(found["slow"]["cpu_us"] / found["dense"]["cpu_us"])
    assert found["slow"]["cpu"] > 1.5


def test_a_quick_run_writes_its_conditions(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    threads = torch.get_num_threads()
    cpu_kernels.main(["--quick", "--rounds", "1", "--threads", str(threads), "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["results"]) == set(cpu_kernels.TABLES)
    assert found["conditions"]["threads"] == threads
    printed = capsys.readouterr().out
    assert "wall / dense" in printed and "mamba2" in printed


def test_a_run_that_names_no_file_writes_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_kernels, "write", lambda *_: pytest.fail("written"))
    cpu_kernels.main(["decode", "--quick", "--rounds", "1", "--threads", str(torch.get_num_threads())])
