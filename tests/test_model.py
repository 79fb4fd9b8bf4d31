"""Loading, dropout, end-of-sequence ids, and the log-probabilities the objective sees."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from grpo_lightning.errors import UsageError
from grpo_lightning.model import disable_dropout, eos_token_ids, load_policy, load_tokenizer, token_logps
from grpo_lightning.rollout.batch import collate
from grpo_lightning.rollout.buffer import Row
from tests.models import VOCABULARY, gpt2, llama
from tests.rollout.test_buffer import row


def rows_of(*pairs: tuple[list[int], list[int]]) -> list[Row]:
    result = []
    for prompt, completion in pairs:
        made = row(len(prompt), len(completion))
        made.token_ids = torch.tensor(prompt + completion)
        result.append(made)
    return result


PAIRS = (([3, 4, 5], [6, 7, 2]), ([8], [9, 2]), ([3, 3, 3, 3, 3], [4, 5, 6, 7, 8, 9]))


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_the_unpadded_rows(make, temperature):
    # P31, P32, P34: padding, positions and the shift by one change nothing.
    model = make()
    with torch.no_grad():
        logp, entropy = token_logps(model, collate(rows_of(*PAIRS)), temperature)
    for n, (prompt, completion) in enumerate(PAIRS):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / temperature, -1)
        chosen = expected.gather(1, torch.tensor(completion)[:, None]).squeeze(1)
        torch.testing.assert_close(logp[n, : len(completion)], chosen, atol=1e-5, rtol=1e-5)
        plain_entropy = -(expected.exp() * expected).sum(-1)
        torch.testing.assert_close(entropy[n, : len(completion)], plain_entropy, atol=1e-5, rtol=1e-5)


class Fixed(nn.Module):
    """Returns the same logits, whatever comes in."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, input_ids, logits_to_keep, **_):
        return SimpleNamespace(logits=self.logits[:, -logits_to_keep:])


def test_logits_of_position_t_minus_1_score_token_t():
    # P34: position k puts all mass on token k; the row [0, 1, 2, 3] is right only if shifted by exactly one.
    logits = torch.full((1, 4, 5), -30.0)
    for k in range(4):
        logits[0, k, k + 1] = 30.0
    logp, _ = token_logps(Fixed(logits), collate(rows_of(([0], [1, 2, 3]))), 1.0)
    torch.testing.assert_close(logp, torch.zeros(1, 3), atol=1e-6, rtol=0)


def test_bfloat16_logits_are_handled_in_float32():
    # P40: bf16 logits [20, 0, ...] over a large vocabulary: logp <= 0 and within 1e-2 of float32.
    logits = torch.zeros(1, 3, 5000)
    logits[..., 1] = 20.0
    batch = collate(rows_of(([1], [1, 1])))
    exact, _ = token_logps(Fixed(logits), batch, 1.0)
    low, entropy = token_logps(Fixed(logits.bfloat16()), batch, 1.0)
    assert low.dtype == torch.float32 and bool((low <= 0).all()) and bool(entropy.isfinite().all())
    torch.testing.assert_close(low, exact, atol=1e-2, rtol=0)


def test_a_ruled_out_token_leaves_the_entropy_finite():
    logits = torch.zeros(1, 2, 4)
    logits[..., 3] = -torch.inf
    _, entropy = token_logps(Fixed(logits), collate(rows_of(([1], [1]))), 1.0)
    torch.testing.assert_close(entropy, torch.tensor([[3.0]]).log())


def test_dropout_is_off_in_training_mode_too():
    model = gpt2(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    ids = torch.arange(3, 9)[None]
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    disable_dropout(model)
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    attention = llama(attention_dropout=0.5).train()
    disable_dropout(attention)
    assert torch.equal(attention(input_ids=ids).logits, attention(input_ids=ids).logits)


def test_every_end_of_sequence_id_is_found():
    # P29: the generation config may list several; the tokenizer may know another.
    model = llama()
    model.generation_config.eos_token_id = [2, 7]
    assert eos_token_ids(model, SimpleNamespace(eos_token_id=9)) == (2, 7, 9)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert eos_token_ids(model, SimpleNamespace(eos_token_id=0)) == (0,)
    with pytest.raises(UsageError, match="end-of-sequence"):
        eos_token_ids(model, SimpleNamespace(eos_token_id=None))


def test_weights_are_float32_whatever_the_folder_holds(tmp_path):
    llama().bfloat16().save_pretrained(tmp_path)
    assert {p.dtype for p in load_policy(str(tmp_path)).parameters()} == {torch.float32}


def test_a_path_that_cannot_be_loaded_is_one_line(tmp_path):
    for path, match in (
        ("./nowhere", "no such folder"),
        (str(tmp_path), "no config.json"),
        ("a/b/c", "no such folder"),
    ):
        with pytest.raises(UsageError, match=match) as caught:
            load_policy(path)
        assert path in str(caught.value) and "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="could not be loaded"):
        load_tokenizer(str(tmp_path))


def test_vocabulary_constant_matches_the_models():
    assert llama().config.vocab_size == gpt2().config.vocab_size == VOCABULARY
