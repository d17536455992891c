"""The benchmark for a GPU, on sizes for the interpreter: its code runs, and it times no wrong kernel."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu
from kvgroups.ops import dispatch

pytestmark = pytest.mark.usefixtures("triton_backend")


def test_every_section_runs_and_the_files_say_that_nothing_was_measured(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    gpu.main(["--tiny", "--json", str(path)])
    written = json.loads(path.read_text())
    assert written["conditions"]["device"] == "cpu, tiny sizes: no measurement"
    assert set(written["results"]) == set(gpu.SECTIONS)
    assert all(rows and not any("left_out" in row for row in rows) for rows in written["results"].values())
    assert all(row["tokens_alike"] == 1 for row in written["results"]["generate"])
    table = path.with_suffix(".md").read_text()
    assert table.strip() == capsys.readouterr().out.strip()
    assert "| head_dim | context | batch | window | us | share_of_copy |" in table


@pytest.mark.parametrize(
    "section, operation", [("decode", "paged_attention"), ("tables", "slot_mapping"), ("scans", "ssd_scan")]
)
def test_a_wrong_kernel_is_not_timed(section, operation, tmp_path, monkeypatch):
    form = dispatch.FORMS[operation]["triton"]
    wrong = replace(form, run=lambda *args, **kwargs: form.run(*args, **kwargs) + 1)
    monkeypatch.setitem(dispatch.FORMS[operation], "triton", wrong)
    with pytest.raises(SystemExit, match=f"{operation}.*A wrong kernel is not timed"):
        gpu.main(["--tiny", "--only", section, "--json", str(tmp_path / "gpu.json")])
    assert not list(tmp_path.iterdir())


def test_what_is_left_out_is_listed(monkeypatch):
    monkeypatch.setattr(gpu, "SECONDS", -1)
    with torch.no_grad():
        rows = list(gpu.states(gpu.Bench(tiny=True)))
    assert [row["left_out"] for row in rows] == ["no time left"]


def test_without_a_gpu_it_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU that torch can see"):
        gpu.main([])
