import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from grpo_lightning.model import TINY_MODEL, load_policy, load_tokenizer
from grpo_lightning.rollout.engine import Request, SamplingParams
from scripts import bench_common, bench_ours, bench_scaling, bench_vs_trl
from scripts.bench_scaling import Sizes
from scripts.fsdp_memory import SHAPE


def report(seconds: float, peak: float, update: float, lengths: tuple[int, ...] = (3, 5)) -> dict:
    return {
        "seconds": seconds, "cpu_s": 2 * seconds, "peak_rss_gb": peak, "phases": {"generate": 1.0, "update": update},
        "lengths": list(lengths), "prompts": [45] * len(lengths),
    }  # fmt: skip


def test_the_lengths_are_those_of_the_issue():
    lengths = bench_common.LENGTHS
    assert (len(lengths), min(lengths), max(lengths), sum(lengths)) == (32, 8, 48, 32 * 29)


def test_the_first_step_is_not_counted_and_the_ratios_are_of_medians():
    ours = [report(100, 1.0, 9), report(4, 1.5, 2), report(2, 2.0, 1), report(3, 2.0, 6)]
    trl = [report(1, 3.0, 9), report(6, 4.0, 2), report(9, 4.0, 1), report(30, 4.0, 6)]
    result = bench_vs_trl.ratios(ours, trl)
    assert result["speedup"] == 9 / 3 and result["memory_ratio"] == 2.0 / 4.0
    assert result["ours"] == {
        "step_s": 3, "steps_s": [4, 2, 3], "cpu_s": 6, "warm_up_s": 100, "phases": {"generate": 1.0, "update": 2},
        "peak_rss_gb": 2.0, "completion_tokens": 8, "mean_length": 4.0, "prompt_tokens": 45.0,
    }  # fmt: skip
    other = {**result, "speedup": 2.5, "memory_ratio": 0.4}
    assert bench_vs_trl.worst({"0.04": result, "0": other}) == {"speedup": 2.5, "memory_ratio": 0.5}
    assert bench_vs_trl.worst({}) == {}
    rows = bench_vs_trl.table({"0.04": result}, "beta")
    assert rows.row_count == 2 and list(rows.columns[-1].cells) == ["3.00", "memory 0.50"]


def test_a_side_that_does_other_work_is_refused():
    good = report(1, 1, 1)
    bench_common.check_lengths("trl", good, (5, 3), 45)
    with pytest.raises(SystemExit, match=r"trl has completions of \[3, 5\] tokens, not of \[4, 5\]"):
        bench_common.check_lengths("trl", good, (5, 4), 45)
    with pytest.raises(SystemExit, match=r"trl has prompts of \[45\] tokens, not of 44"):
        bench_common.check_lengths("trl", good, (3, 5), 44)


@pytest.mark.parametrize("tokens", [2, 32, 200])
def test_prompts_have_the_length_asked_for(tmp_path, tokens):
    bench_common.write_prompts(tmp_path, "tiny", 4, tokens)
    rows = [json.loads(line) for name in ("train", "val") for line in (tmp_path / f"{name}.jsonl").open()]
    tokenizer = load_tokenizer("tiny")
    assert len({row["prompt"] for row in rows}) == 5
    assert [len(tokenizer(row["prompt"])["input_ids"]) for row in rows] == [tokens] * 5


def test_prompts_too_short_to_differ_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="prompts of 1 tokens"):
        bench_common.write_prompts(tmp_path, "tiny", 8, 1)


def test_our_engine_has_the_imposed_lengths_row_by_row():
    engine = bench_ours.ImposedLengths([[2] * 6, [1, 4, 7, 3, 7, 5]], max_rows=16)
    policy = load_policy("tiny")
    requests = [Request((3, 4, 5), (0, 0, 1, number), 3) for number in range(2)]
    every_token_ends = tuple(range(policy.config.vocab_size))
    for eos in ((), every_token_ends):
        for version, lengths in ((0, [2] * 6), (1, [1, 4, 7, 3, 7, 5]), (5, [1, 4, 7, 3, 7, 5])):
            engine.sync(policy, version)
            groups = engine.generate(requests, SamplingParams(7, 1.0, eos))
            assert [len(completion.token_ids) for group in groups for completion in group] == lengths


def test_trl_draws_the_end_of_sequence_where_it_is_imposed_and_only_there():
    pytest.importorskip("trl", reason="make setup-bench")
    from scripts.bench_trl import ImposedLengths

    impose = ImposedLengths(torch.tensor([1, 3]), 4, torch.tensor([2, 0]))
    for position, ends in enumerate(([True, False], [False, False], [False, True])):
        scores = impose(torch.zeros(2, 4 + position, dtype=torch.long), torch.ones(2, 5))
        for row, end in enumerate(ends):
            expected = [0.0, 0, 1, 0, 0] if end else [0, 1 / 3, 0, 1 / 3, 1 / 3]
            torch.testing.assert_close(scores[row].softmax(-1), torch.tensor(expected))


def test_useful_flop_against_a_count_by_hand():
    model = Sizes(body=1000, head=300, layers=2, heads=3, head_dim=5)
    # A prompt of 4 and completions of 1 and 3: 4 + 0 + 2 tokens through the layers, 1 + 0 + 2 next tokens wanted. Keys
    # attended to: 1 + 2 + 3 + 4 in the prompt, none for the completion of one token, 5 + 6 for the other's first two.
    assert bench_scaling.forward_flop(model, 4, [1, 3]) == 2 * 1000 * 6 + 2 * 300 * 3 + 4 * 3 * 5 * 2 * (10 + 11)


def test_sizes_of_a_model_whose_embedding_is_its_output_projection_and_of_one_where_it_is_not(tmp_path):
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)  # of SmolLM2-135M: 134,515,008 parameters
    assert bench_scaling.sizes(str(tmp_path)) == Sizes(134_515_008 - 49152 * 576, 49152 * 576, 30, 9, 64)
    found, model = bench_scaling.sizes(str(TINY_MODEL)), AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    head = model.config.vocab_size * model.config.hidden_size
    assert not model.config.tie_word_embeddings
    assert (found.body, found.head) == (sum(p.numel() for p in model.parameters()) - 2 * head, head)


def test_points_by_name_and_by_size():
    assert bench_scaling.chosen(["long", "12x4x2", "45x1024x16"]) == [(45, 1024, 16), (12, 4, 2)]
    wanted = bench_scaling.chosen(["completion", "12x4x2"])
    assert len(wanted) == 6 and bench_scaling.by_sweep(wanted)["points"] == [(12, 4, 2)]
    assert {(45, 64, 8)} == set(bench_scaling.by_sweep(wanted)["group"])
    for wrong in ("lengths", "1x2", "0x4x2", "4x4x1"):
        with pytest.raises(ValueError, match=f"--points {wrong}: one of completion, prompt, group, long"):
            bench_scaling.chosen([wrong])


def test_a_point_of_a_real_run_and_its_file(tmp_path, monkeypatch, capsys):
    """Through `python train.py` in a process of its own: lengths as imposed, and what the file says adds up."""
    file = tmp_path / "scaling.json"
    command = ["--model", "tiny", "--points", "12x9x4", "--threads", "1", "--steps", "2", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["bench_scaling.py", *command])
    bench_scaling.main()
    assert "12x9x4" in capsys.readouterr().out
    data = json.loads(file.read_text())
    point = data["points"]["12x9x4"]
    assert point["completion_tokens"] == 36 and point["mean_length"] == 9 and point["prompt_tokens"] == 12
    assert len(point["steps_s"]) == 2 and 0.1 < point["peak_rss_gb"] < 5
    model = Sizes(**point["model"])
    useful = 5 * bench_scaling.forward_flop(model, 12, [9] * 4)
    assert point["useful_gflop"] == pytest.approx(useful / 1e9)
    assert point["share"] == pytest.approx(useful / 1e9 / point["matrix_gflop_s"] / point["step_s"])
    assert 0 < point["share"] < 1 and set(point["shares_of_phases"]) == {"generate", "reference", "update"}
    assert sum(point["phases"].values()) < 1.05 * sum(point["steps_s"])

    # Told to go on, it measures nothing again.
    monkeypatch.setattr(bench_scaling, "measure", None)
    monkeypatch.setattr(sys, "argv", ["bench_scaling.py", *command, "--resume"])
    bench_scaling.main()
    assert json.loads(file.read_text()) == data
    monkeypatch.setattr(sys, "argv", ["bench_scaling.py", *command, "--resume", "--beta", "0"])
    with pytest.raises(SystemExit, match="was measured with other settings"):
        bench_scaling.main()


def test_both_sides_in_turns_and_what_the_file_keeps(tmp_path, monkeypatch, capsys):
    """The order of the steps, the refusal of other work, and the file after each counted pair."""
    order: list[str] = []

    class Stub:
        def __init__(self, side: str, seconds: list[float], lengths: list[list[int]]):
            self.side, self.steps = side, iter(zip(seconds, lengths, strict=True))

        def answer(self) -> dict:
            return {"ready": True}

        def step(self) -> dict:
            order.append(self.side)
            seconds, lengths = next(self.steps)
            return {**report(seconds, 2.0 if self.side == "ours" else 5.0, 1.0), "lengths": lengths, "prompts": [45]}

        def close(self) -> None:
            order.append(f"{self.side} ended")

    saved = []
    monkeypatch.setattr(bench_vs_trl.Results, "save", lambda self: saved.append(json.loads(json.dumps(self.data))))
    monkeypatch.setattr(
        bench_vs_trl, "start_ours", lambda options, folder, lengths, *_: Stub("ours", [9, 2, 4], lengths)
    )
    monkeypatch.setattr(
        bench_vs_trl, "start_trl", lambda options, path, folder, lengths, *_: Stub("trl", [9, 6, 6], lengths)
    )
    monkeypatch.setattr(bench_vs_trl.importlib.util, "find_spec", lambda name: SimpleNamespace())
    options = ["--model", "tiny", "--steps", "2", "--beta", "0.04", "--json", str(tmp_path / "x.json")]
    monkeypatch.setattr(sys, "argv", ["bench_vs_trl.py", *options])
    bench_vs_trl.main()
    assert order == ["ours", "trl"] * 3 + ["ours ended", "trl ended"]
    assert [s["betas"]["0.04"]["complete"] for s in saved] == [False, True]
    assert [s["speedup"] for s in saved] == [3.0, 2.0] and saved[-1]["memory_ratio"] == 0.4
    assert saved[-1]["betas"]["0.04"]["trl"]["phases"] == {"generate": 1.0, "update": 1.0}
    assert "speedup 2.00, memory ratio 0.40" in capsys.readouterr().out


def test_both_sides_for_real(tmp_path, monkeypatch):
    """Where TRL is installed: the same lengths and prompts on both sides, or it would refuse."""
    pytest.importorskip("trl", reason="make setup-bench")
    file = tmp_path / "x.json"
    options = ["--model", "tiny", "--steps", "1", "--beta", "0.04", "--threads", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["bench_vs_trl.py", *options])
    bench_vs_trl.main()
    point = json.loads(file.read_text())["betas"]["0.04"]
    for side in ("ours", "trl"):
        assert (point[side]["completion_tokens"], point[side]["prompt_tokens"]) == (928, 45)
        phases = point[side]["phases"]
        whole = sum(phases.get(name, 0) for names in bench_vs_trl.PHASES.values() for name in names)
        assert 0.5 * point[side]["step_s"] < whole < 1.01 * point[side]["step_s"]
    assert {"reference", "forward", "backward"} < set(point["trl"]["phases"])
    assert point["speedup"] == pytest.approx(point["trl"]["step_s"] / point["ours"]["step_s"])


def test_rows_of_trl_in_a_cell():
    cells = {cell: bench_vs_trl.cell_rows(*cell) for cell in bench_vs_trl.CELLS}
    assert cells == {(32, 32): 8, (32, 128): 8, (32, 512): 4, (512, 32): 4, (512, 128): 4, (512, 512): 2}


def test_without_trl_one_line_says_what_to_do(monkeypatch):
    monkeypatch.setattr(bench_vs_trl.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["bench_vs_trl.py"])
    with pytest.raises(SystemExit) as ended:
        bench_vs_trl.main()
    assert ended.value.code == "TRL is not installed: run `make setup-bench`"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--steps", "0"], "--steps and --threads must be at least 1"),
        (["--rows", "5"], "--rows must divide the 32 completions"),
        (["--beta", "-1"], "--beta must be at least 0"),
        (["--cells", "--rows", "16"], "--rows must divide the 8 completions"),
        (["--cell", "32x32", "--beta", "0"], "no --beta, --steps and --tune with them"),
        (["--cell", "0x32"], "0x32 is no PROMPTxCOMPLETION such as 32x128"),
        (["--rows", "8", "--tune"], "give one of them"),
    ],
)
def test_wrong_arguments_end_in_one_line(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_vs_trl.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench_vs_trl.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_child_that_fails_says_why():
    child = bench_common.Child("ours", [sys.executable, "-c", "raise RuntimeError('no such thing')", ""], 1)
    try:
        with pytest.raises(SystemExit, match=r"no such thing(.|\n)*ours failed"):
            child.answer()
    finally:
        child.close()


def test_setup_bench_installs_the_version_that_is_pinned():
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "setup-bench"], cwd=bench_common.ROOT, capture_output=True, text=True
    )
    assert "pip install --quiet --constraint constraints.txt trl" in done.stdout, done.stderr
    assert "trl==1.16.0" in (bench_common.ROOT / "constraints.txt").read_text().split()
