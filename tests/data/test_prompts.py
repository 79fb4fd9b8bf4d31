"""Templates, chat templates, special tokens, long prompts; the order in which prompts are drawn."""

from collections import Counter

import pytest

from grpo_lightning.data import Item, Prompt, PromptStream, tokenize
from grpo_lightning.errors import UsageError
from tests.data.tokenizers_for_tests import CHAT, tokenizer

BOS, EOS = 0, 1


def one(item: Item, tok, **options) -> Prompt:
    prompts, skipped = tokenize([item], tok, **options)
    assert skipped == 0
    return prompts[0]


def test_chat_template_is_applied_once_with_the_generation_prompt():
    for adds in ("", "bos", "bos eos"):
        tok = tokenizer(CHAT, adds)
        prompt = one(Item("2+3", "5", {"level": 1}), tok)
        assert prompt.text == "<s>[user]2+3</s>[assistant]"
        assert prompt.text.count("[assistant]") == 1
        assert Counter(prompt.token_ids)[BOS] == 1  # not once by the template and once by the tokenizer
        assert prompt.token_ids[0] == BOS
        assert tok.decode(prompt.token_ids[-11:]).replace(" ", "") == "[assistant]"
        assert (prompt.answer, prompt.columns, prompt.prompt_id) == ("5", {"level": 1}, 0)


def test_nothing_is_added_to_what_a_chat_template_writes():
    prompt = one(Item("2+3", "5"), tokenizer(CHAT.replace("{{ bos_token }}", ""), "bos eos"))
    assert prompt.text == "[user]2+3</s>[assistant]"
    assert BOS not in prompt.token_ids and Counter(prompt.token_ids)[EOS] == 1


def test_without_a_chat_template_the_text_is_plain():
    assert one(Item("2+3", "5"), tokenizer()).text == "2+3"
    ids = one(Item("2+3", "5"), tokenizer(adds="bos")).token_ids
    assert ids[0] == BOS and len(ids) == 4
    # an end-of-sequence token would end the prompt before the model has said anything
    assert one(Item("2+3", "5"), tokenizer(adds="bos eos")).token_ids == ids
    assert one(Item("2+3", "5"), tokenizer(adds="eos")).token_ids == ids[1:]


def test_plain_text_that_begins_with_bos_gets_no_second_one():
    ids = one(Item("<s>2+3", "5"), tokenizer(adds="bos")).token_ids
    assert ids[0] == BOS and Counter(ids)[BOS] == 1


def test_chat_can_be_turned_off_and_not_on():
    assert one(Item("2+3", "5"), tokenizer(CHAT), chat=False).text == "2+3"
    assert one(Item("2+3", "5"), tokenizer(CHAT), chat=True).text == "<s>[user]2+3</s>[assistant]"
    with pytest.raises(UsageError, match=r"data\.chat=true.*no chat template"):
        tokenize([Item("2+3", "5")], tokenizer(), chat=True)
    with pytest.raises(UsageError, match=r"data\.chat must be true, false or auto, got 'yes'"):
        tokenize([Item("2+3", "5")], tokenizer(), chat="yes")


def test_template_and_system_prompt():
    item = Item("2+3", "5", {"unit": "cm", "prompt": "not this"})
    text = one(item, tokenizer(CHAT), template="{{Say}} {prompt} in {unit}", system_prompt="Be short").text
    assert text == "<s>[system]Be short</s>[user]{Say} 2+3 in cm</s>[assistant]"
    assert one(item, tokenizer(), system_prompt="Be short").text == "Be short\n\n2+3"
    assert one(Item("{unit} {", "5"), tokenizer()).text == "{unit} {"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{question}", "data.template names 'question'.*there are: prompt, unit"),
        ("{prompt", "no valid template"),
        ("{}", "no valid template"),
        ("{prompt.x}", "no valid template"),
    ],
)
def test_bad_templates(template, message):
    with pytest.raises(UsageError, match=message):
        tokenize([Item("2+3", "5", {"unit": "cm"})], tokenizer(), template=template)


def test_chat_messages_as_prompts():
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "2+3"}]
    assert one(Item(messages, "5"), tokenizer(CHAT)).text == "<s>[system]S</s>[user]2+3</s>[assistant]"
    assert one(Item(messages, "5"), tokenizer(CHAT), system_prompt="other").text.count("[system]") == 1
    text = one(Item(messages[1:], "5"), tokenizer(CHAT), system_prompt="other").text
    assert text == "<s>[system]other</s>[user]2+3</s>[assistant]"
    assert len(messages) == 2
    with pytest.raises(UsageError, match="need a model with a chat template"):
        tokenize([Item(messages, "5")], tokenizer())
    with pytest.raises(UsageError, match=r"data\.template must be"):
        tokenize([Item(messages, "5")], tokenizer(CHAT), template="Q: {prompt}")
    with pytest.raises(UsageError, match="must not be the assistant's"):
        tokenize([Item([{"role": "assistant", "content": "x"}], "5")], tokenizer(CHAT))
    with pytest.raises(UsageError, match="chat template refuses the prompt: no tools"):
        tokenize([Item([{"role": "tool", "content": "x"}], "5")], tokenizer(CHAT))


def test_long_prompts_are_skipped_and_counted_or_an_error():
    items = [Item("123", "a"), Item("123456", "b"), Item("1234", "c")]
    prompts, skipped = tokenize(items, tokenizer(), max_prompt_tokens=4)
    assert [(p.prompt_id, p.answer) for p in prompts] == [(0, "a"), (2, "c")]
    assert skipped == 1
    with pytest.raises(UsageError, match=r"prompt 1 has 6 tokens.*max_prompt_tokens=4.*long_prompts=skip"):
        tokenize(items, tokenizer(), max_prompt_tokens=4, long_prompts="error")
    with pytest.raises(
        UsageError, match=r"all 3 prompts are longer.*=2.*shortest has 3.*raise data\.max_prompt_tokens"
    ):
        tokenize(items, tokenizer(), max_prompt_tokens=2)


def test_bad_options_and_empty_prompts():
    with pytest.raises(UsageError, match=r"data\.long_prompts must be skip or error"):
        tokenize([], tokenizer(), long_prompts="cut")
    with pytest.raises(UsageError, match=r"data\.max_prompt_tokens must be at least 1"):
        tokenize([], tokenizer(), max_prompt_tokens=0)
    with pytest.raises(UsageError, match="prompt 0 has no tokens"):
        tokenize([Item("", "5")], tokenizer())
    assert tokenize([], tokenizer()) == ([], 0)


def prompts(n: int) -> list[Prompt]:
    return [Prompt(i, str(i), (i,), None, {}) for i in range(n)]


def ids(drawn: list[tuple[int, Prompt]]) -> list[int]:
    return [prompt.prompt_id for _, prompt in drawn]


def test_every_prompt_once_per_pass_whatever_the_batch():
    stream = PromptStream(prompts(9), seed=0)
    drawn = [pair for _ in range(9) for pair in stream.draw(4)]
    assert [index for index, _ in drawn] == list(range(36))
    passes = [ids(drawn[k : k + 9]) for k in range(0, 36, 9)]
    assert all(sorted(p) == list(range(9)) for p in passes)
    assert len({tuple(p) for p in passes}) == 4  # a new order each time
    one_by_one = PromptStream(prompts(9), seed=0)
    assert [ids(one_by_one.draw(1))[0] for _ in range(36)] == ids(drawn)
    assert ids(PromptStream(prompts(9), seed=1).draw(9)) != passes[0]


@pytest.mark.parametrize("stop", [2, 9, 11])
def test_a_restored_stream_goes_on_where_it_stopped(stop):
    whole = PromptStream(prompts(9), seed=3)
    expected = [pair for _ in range(20) for pair in whole.draw(1)]
    first = PromptStream(prompts(9), seed=3)
    for _ in range(stop):
        first.draw(1)
    second = PromptStream(prompts(9), seed=3)
    second.load_state_dict(first.state_dict())
    assert second.position == stop
    assert [second.draw(1)[0] for _ in range(stop, 20)] == expected[stop:]


def test_a_state_of_other_data_or_another_seed_is_refused():
    state = PromptStream(prompts(9), seed=3).state_dict()
    with pytest.raises(UsageError, match="seed=3, this run has seed=4"):
        PromptStream(prompts(9), seed=4).load_state_dict(state)
    with pytest.raises(UsageError, match="other training prompts"):
        PromptStream(prompts(8), seed=3).load_state_dict(state)
    with pytest.raises(UsageError, match="other training prompts"):
        PromptStream(prompts(10)[1:], seed=3).load_state_dict(state)


def test_more_prompts_than_there_are():
    stream = PromptStream(prompts(8), seed=0)
    with pytest.raises(UsageError, match="16 is more than the 8 training prompts"):
        stream.draw(16)
    assert stream.position == 0
    with pytest.raises(UsageError, match="no training prompts"):
        PromptStream([], seed=0)
