"""reward=model and reward=process_model against the bare transformers model, one text at a time."""

import math
import random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertForSequenceClassification,
    LlamaConfig,
)

from grpo_lightning.errors import UsageError
from grpo_lightning.reward import RewardBatch, RewardSet
from grpo_lightning.reward.classifier import own_device
from grpo_lightning.reward.model import Model
from grpo_lightning.reward.process_model import ProcessModel
from tests.reward.classifiers import CHARACTERS, CHAT, save, token_classifier, tokenizer


def batch(completions: list[str], prompt: str = "1+1=", **columns) -> RewardBatch:
    n = len(completions)
    return RewardBatch([prompt] * n, completions, [None] * n, columns={k: [v] * n for k, v in columns.items()})


def alone(path: str, ids: list[int]) -> torch.Tensor:
    """The logits of one text without padding, from transformers itself."""
    config = LlamaConfig.from_pretrained(path)
    kind = AutoModelForTokenClassification if "Token" in config.architectures[0] else AutoModelForSequenceClassification
    with torch.inference_mode():
        return kind.from_pretrained(path).eval()(input_ids=torch.tensor([ids])).logits[0]


def ids_of(*pieces: str) -> list[int]:
    """Ids by hand: special tokens as pieces of their own, other pieces character by character."""
    return [CHARACTERS.index(c) for piece in pieces for c in ([piece] if piece in CHARACTERS[:3] else piece)]


TEXTS = ["2", "a<bos>", "", "two of them", "abc,de;f\nghi", "aaa", "<eos>", "x" * 30]


@pytest.mark.parametrize("changes", [{}, {"pad_token_id": 1}, {"pad_token_id": 3}])
@pytest.mark.parametrize("tokens", [1, 20, 100000])
def test_scores_are_those_of_one_text_at_a_time(tmp_path, changes, tokens):
    path = save(tmp_path, **changes)
    scores = Model(path, tokens=tokens)(batch(TEXTS))
    expected = [float(alone(path, tokenizer()("1+1=" + text)["input_ids"])) for text in TEXTS]
    assert scores == pytest.approx(expected, abs=1e-5)
    different = len({round(score, 3) for score in scores})  # each text counts to its end, as the model sees it
    assert different == len(TEXTS) - (changes.get("pad_token_id") == 1)  # to this one <eos> is padding


def test_by_hand_the_prompt_comes_first_and_the_special_token_once(tmp_path):
    path = save(tmp_path)
    expected = float(alone(path, ids_of("<bos>", "1+1=", "2")))
    assert Model(path)(batch(["2"])) == [pytest.approx(expected, abs=1e-5)]
    assert Model(path)(batch(["2"], prompt="<bos>1+1=")) == [pytest.approx(expected, abs=1e-5)]


def test_an_encoder(tmp_path):
    path = save(tmp_path, BertForSequenceClassification)
    scores = Model(path)(batch(TEXTS))
    expected = [float(alone(path, tokenizer()("1+1=" + text)["input_ids"])) for text in TEXTS]
    assert scores == pytest.approx(expected, abs=1e-5)


def test_every_id_in_use_leaves_none_for_padding(tmp_path):
    path = save(tmp_path)
    everything = ["1+1=", "".join(CHARACTERS[3:]), "<eos>", "<sep>", "<bos>"]
    scores = Model(path)(batch(["".join(everything[1:]), "2"]))
    expected = [float(alone(path, ids_of("<bos>", *pieces))) for pieces in (everything, ["1+1=", "2"])]
    assert scores == pytest.approx(expected, abs=1e-5)


def test_with_the_reward_models_chat_template(tmp_path):
    path = save(tmp_path, chat=CHAT)
    expected = float(alone(path, ids_of("u:what", "<eos>", "a:two", "<eos>")))
    assert Model(path, question="ask")(batch(["two"], ask="what")) == [pytest.approx(expected, abs=1e-5)]
    messages = [{"role": "user", "content": "what"}]
    assert Model(path, question="ask")(batch(["two"], ask=messages)) == [pytest.approx(expected, abs=1e-5)]
    assert Model(path, question="prompt")(batch(["two"], prompt="what")) == [pytest.approx(expected, abs=1e-5)]
    plain = float(alone(path, ids_of("<bos>", "1+1=", "two")))
    assert Model(path, chat=False)(batch(["two"])) == [pytest.approx(plain, abs=1e-5)]
    with pytest.raises(UsageError, match=r"reward\.model\.question is needed for the reward model's chat template"):
        Model(path)
    with pytest.raises(UsageError, match=r"reward\.model\.question=asked is no column.*there are: ask, prompt"):
        Model(path, question="asked")(batch(["two"], ask="what"))


def test_a_text_too_long_for_the_model_has_no_score(tmp_path):
    result = RewardSet({"model": Model(save(tmp_path))})(batch(["a" * 59, "a" * 60]))
    assert not math.isnan(result.total[0]) and math.isnan(result.total[1])
    assert "row 1: the text has 65 tokens" in result.errors[0] and "reads 64 at most" in result.errors[0]


def test_bf16_and_the_device(tmp_path):
    path = save(tmp_path)
    component = Model(path, bf16=True, device="cpu")
    scores = component(batch(["2", "aaa"]))
    assert component.classifier.model.dtype == torch.bfloat16
    assert scores == pytest.approx(Model(path)(batch(["2", "aaa"])), abs=0.2)
    assert Model(path, device="meta").classifier.model.device.type == "meta"


def test_batches_hold_so_many_tokens(tmp_path, monkeypatch):
    component = Model(save(tmp_path), tokens=40)
    shapes = []
    forward = component.classifier._forward
    monkeypatch.setattr(
        component.classifier, "_forward", lambda rows: shapes.append([*map(len, rows)]) or forward(rows)
    )
    component(batch(["a" * n for n in (1, 50, 15, 5, 5, 14, 1)]))
    assert shapes == [[55], [20, 19], [10, 10, 6, 6]]  # 5 tokens of the prompt each; the longest first


def test_a_column_named_prompt_is_the_question(tmp_path):
    path = save(tmp_path, chat=CHAT)
    expected = float(alone(path, ids_of("u:what", "<eos>", "a:two", "<eos>")))
    rows = RewardBatch(["u:what<eos>a:"], ["two"], [None], columns={"prompt": ["what"]})
    assert Model(path, question="prompt")(rows) == [pytest.approx(expected, abs=1e-5)]


def test_each_process_has_its_own_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_device() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "3")  # each process sees only some of the machine's devices
    assert own_device() == torch.device("cuda", 1)
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert own_device() == torch.device("cuda", 1)
    monkeypatch.delenv("SLURM_LOCALID")
    assert own_device() == torch.device("cuda", 0)


def test_what_is_no_reward_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has 2 labels; a reward model has one"):
        Model(save(tmp_path / "two", num_labels=2))
    AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(save(tmp_path / "lm"))).save_pretrained(
        tmp_path / "lm"
    )
    with pytest.raises(UsageError, match=r"is no sequence classifier: it has no score\.weight") as error:
        Model(str(tmp_path / "lm"))(batch(["2"]))
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match=r"reward\.model\.path=.*nothing cannot be loaded: ") as error:
        Model(str(tmp_path / "nothing"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": None}, r"reward\.model\.path is needed"),
        ({"tokens": 0}, r"reward\.model\.tokens must be a whole number from 1"),
        ({"device": "gpu7"}, r"reward\.model\.device must be auto, cpu, cuda"),
        ({"chat": "yes"}, r"reward\.model\.chat must be true, false or auto"),
        ({"chat": True}, r"reward\.model\.chat=true, but the reward model's tokenizer has no chat template"),
        ({"question": "ask"}, r"reward\.model\.question has no effect without a chat template"),
    ],
)
def test_options(tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        Model(**{"path": save(tmp_path)} | options)


COMPLETIONS = ["7,12,6", "", "abc", "1,,22,x,", "a" * 20 + ",b"]


def step_scores(component: ProcessModel, rows: RewardBatch) -> list[list[float]]:
    return [[step.reward for step in row] for row in component.steps(rows)]


def test_token_classifier_is_read_off_at_the_last_token_of_each_step(tmp_path):
    path = token_classifier(tmp_path)
    whole = alone(path, ids_of("<bos>", "1+1=", "7,12,6")).softmax(-1)[:, 1]
    expected = [float(whole[i]) for i in (1 + 4 + 1, 1 + 4 + 4, 1 + 4 + 5)]  # the two commas and the end
    component = ProcessModel(path, delimiter=",")
    steps = component.steps(batch(["7,12,6"]))[0]
    assert [step.end for step in steps] == [2, 5, 6]
    assert [step.reward for step in steps] == pytest.approx(expected, abs=1e-5)
    assert component(batch(["7,12,6"])) == [pytest.approx(sum(expected) / 3, abs=1e-5)]
    other = ProcessModel(path, delimiter=",", label=0).steps(batch(["7,12,6"]))[0]
    assert [step.reward for step in other] == pytest.approx([1 - score for score in expected], abs=1e-5)


def test_token_classifier_with_a_separator(tmp_path):
    path = token_classifier(tmp_path)
    whole = alone(path, ids_of("<bos>", "1+1=", "7,", "<sep>", "12,", "<sep>", "6", "<sep>")).softmax(-1)[:, 1]
    expected = [float(whole[i]) for i in (7, 11, 13)]
    component = ProcessModel(path, delimiter=",", separator="<sep>")
    assert step_scores(component, batch(["7,12,6"])) == [pytest.approx(expected, abs=1e-5)]
    assert [step.end for step in component.steps(batch(["7,12,6"]))[0]] == [2, 5, 6]  # in the completion itself


def test_token_classifier_in_a_chat(tmp_path):
    path = token_classifier(tmp_path, chat=CHAT)
    whole = alone(path, ids_of("u:x;y", "<eos>", "a:x;y", "<eos>")).softmax(-1)[:, 1]
    component = ProcessModel(path, delimiter=";", question="ask")
    # "u:x;y" <eos> "a:" is 8 tokens; the question says the same as the completion, of which the template strips one
    expected = pytest.approx([float(whole[9]), float(whole[10])], abs=1e-5)
    assert step_scores(component, batch(["x;y", " x;y\n"], ask="x;y")) == [expected, expected]


@pytest.mark.parametrize("head", ["token", "sequence"])
@pytest.mark.parametrize("labels", [1, 2])
def test_batches_change_nothing(tmp_path, head, labels):
    path = token_classifier(tmp_path, num_labels=labels) if head == "token" else save(tmp_path, num_labels=labels)
    together = step_scores(ProcessModel(path, head=head, delimiter=","), batch(COMPLETIONS))
    singly = [step_scores(ProcessModel(path, head=head, delimiter=",", tokens=1), batch([c]))[0] for c in COMPLETIONS]
    assert [len(row) for row in together] == [3, 0, 1, 3, 2]
    for row, expected in zip(together, singly, strict=True):
        assert row == pytest.approx(expected, abs=1e-5)
    if labels == 2:
        assert all(0 < score < 1 for row in together for score in row)


@pytest.mark.parametrize("labels", [1, 3])
def test_sequence_classifier_reads_up_to_each_step(tmp_path, labels):
    path = save(tmp_path, num_labels=labels)
    logits = [alone(path, ids_of("<bos>", "1+1=", text)) for text in ("7,", "7,12,", "7,12,6")]
    expected = [float(row if labels == 1 else row.softmax(-1)[2]) for row in logits]
    component = ProcessModel(path, head="sequence", delimiter=",", label=2)
    assert step_scores(component, batch(["7,12,6"])) == [pytest.approx(expected, abs=1e-5)]
    marked = [
        alone(path, ids_of("<bos>", "1+1=", *pieces)) for pieces in (["7,", "<sep>"], ["7,", "<sep>", "12", "<sep>"])
    ]
    expected = [float(row if labels == 1 else row.softmax(-1)[2]) for row in marked]
    component = ProcessModel(path, head="sequence", delimiter=",", label=2, separator="<sep>")
    assert step_scores(component, batch(["7,12"])) == [pytest.approx(expected, abs=1e-5)]


def test_process_model_in_a_reward_set(tmp_path):
    rng = random.Random(0)
    completions = ["".join(rng.choice("12,ab") for _ in range(rng.randrange(40))) for _ in range(12)] + ["a,b" * 30]
    rewards = RewardSet({"process_model": ProcessModel(token_classifier(tmp_path), delimiter=",")})
    result = rewards(batch(completions))
    for i, (row, completion) in enumerate(zip(result.steps[:-1], completions, strict=False)):
        ends = [k + 1 for k, c in enumerate(completion) if c == "," and completion[:k].rpartition(",")[2]]
        assert [step.end for step in row][: len(ends)] == ends
        mean = sum(step.reward for step in row) / len(row) if row else math.nan
        assert result.components["process_model"][i] == pytest.approx(mean, nan_ok=True)
    assert result.steps[-1] is None and "row 12: the text has 95 tokens" in result.errors[0]
    assert rewards.components["process_model"](batch(["a,b" * 30])) == [None]


def test_a_template_that_drops_the_completion_costs_the_row(tmp_path):
    dropping = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}<eos>{% endfor %}"
    component = ProcessModel(token_classifier(tmp_path, chat=dropping), delimiter=",", question="ask")
    result = RewardSet({"process_model": component})(batch(["a,b", "<think>a,</think>b"], ask="q"))
    assert len(result.steps[0]) == 2 and result.steps[1] is None
    assert "row 1: ValueError: the reward model's chat template leaves out" in result.errors[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "tokens"}, r"reward\.process_model\.head must be token or sequence"),
        ({"label": 2}, r"reward\.process_model\.label must be from 0 to 1"),
        ({"split": "math.sqrt", "delimiter": ","}, r"reward\.process_model: one of delimiter"),
        ({"path": None}, r"reward\.process_model\.path is needed"),
        ({"question": "ask"}, r"reward\.process_model\.question has no effect"),
    ],
)
def test_process_options(tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        ProcessModel(**{"path": token_classifier(tmp_path)} | options)


def test_steps_end_at_blank_lines_where_nothing_else_is_said(tmp_path):
    steps = ProcessModel(token_classifier(tmp_path)).steps(batch(["a,b\n\nc"]))[0]
    assert [step.end for step in steps] == [5, 6]


def test_the_tokenizer_saved_is_the_one_loaded(tmp_path):
    loaded = AutoTokenizer.from_pretrained(save(tmp_path))
    assert loaded("1+<sep>")["input_ids"] == ids_of("<bos>", "1+", "<sep>") and loaded.pad_token is None
