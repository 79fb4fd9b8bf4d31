from pathlib import Path

import pytest

from scripts.bench_rollout import BEGIN, END, fill, report

MEASURED = {
    "tiny": {
        "vllm": {"tokens": 1800, "generate": [2.0, 1.8, 3.0], "sync": [0.1, 0.3, 0.2], "update": [7.8, 7.8, 1.0]},
        "bare": {"tokens": 2000, "generate": [1.0, 2.0, 4.0]},
    }
}


def test_the_table_has_medians_the_share_of_bare_vllm_and_of_a_step(tmp_path):
    table = report(MEASURED, 3)
    assert "| tiny | `rollout=vllm` | 900 (600 to 1,000) | 90% | 0.200 | 7.80 | 2.0% |" in table
    assert "| tiny | bare `vllm.LLM.generate` | 1,000 (500 to 2,000) | 100% |  |  |  |" in table
    file = tmp_path / "page.md"
    file.write_text(f"before\n{BEGIN}\nolder\n{END}\nafter\n")
    for _ in range(2):
        fill(file, table)
        assert file.read_text() == f"before\n{BEGIN}\n{table}\n{END}\nafter\n"


def test_a_page_without_the_lines_is_refused_before_anything_is_measured(tmp_path):
    for page in (tmp_path / "none.md", tmp_path / "other.md"):
        (tmp_path / "other.md").write_text(f"text\n{BEGIN}\n")
        with pytest.raises(SystemExit, match="must be a file with the lines"):
            fill(page, None)
    fill(Path(__file__).parents[2] / "docs" / "rollouts.md", None)
