"""What is taught of a row, token by token, and which rows are refused."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from supervised_toys import ROWS, SEEN, TOOL, task, taught, tutor
from transformers import AutoTokenizer

from sharpen.errors import DatasetError
from sharpen.gateway.render import Renderer
from sharpen.learning.algorithm.supervised import SUPERVISED
from sharpen.learning.supervised.batches import weighted
from sharpen.learning.supervised.checks import check_step

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"


def test_loss_is_on_the_assistants_tokens_with_their_end_token_and_on_nothing_else(toy_model_dir):
    """Made by hand: the toy template writes `<|im_start|>role\\ncontent<|im_end|>\\n`."""
    one = tutor(toy_model_dir)
    lesson = one.lesson(task(messages=SEEN))
    (experience,) = lesson.experiences
    text = (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>{"name": "calculator", "arguments": {"expression":"2+2"}}</tool_call><|im_end|>'
        "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n#### 4<|im_end|>"
    )
    assert one.tokenizer.decode(experience.ids_T) == text
    assert taught(one, lesson) == [
        '<tool_call>{"name": "calculator", "arguments": {"expression":"2+2"}}</tool_call><|im_end|>',
        "#### 4<|im_end|>",
    ]
    assert (experience.advantages_T == experience.loss_mask_T).all()
    assert set(experience.calls_T.tolist()) == {-1, 0, 1}


def test_ids_by_hand(toy_model_dir):
    one = tutor(toy_model_dir)
    (experience,) = one.lesson(task(prompt="a", response="b")).experiences
    ids = [one.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>")]
    assert experience.ids_T[-1] == ids[1]
    assert experience.ids_T[0] == ids[0]
    expected = one.tokenizer("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    answer = one.tokenizer("b")["input_ids"]
    assert experience.ids_T.tolist() == [*expected, *answer, ids[1]]
    assert experience.loss_mask_T.tolist() == [False] * len(expected) + [True] * (len(answer) + 1)


def test_a_lesson_is_what_the_quickstarts_agent_would_have_seen(tmp_path):
    """The prompts of the taught turns are, id for id, the gateway's prompts for the same conversation with tools."""
    one = tutor(QUICKSTART / "model", max_model_len=512)
    row = task(messages=SEEN, tools=json.dumps([TOOL]))
    (experience,) = one.lesson(row).experiences
    first = one.renderer.encode(one.renderer.render(SEEN[:1], [TOOL], {}))
    assert experience.ids_T[: len(first)].tolist() == first.tolist()
    assert experience.loss_mask_T[len(first)]
    assert not experience.loss_mask_T[: len(first)].any()
    whole = one.tokenizer.apply_chat_template(SEEN, tools=[TOOL], tokenize=False)
    assert whole.rstrip("\n") == one.tokenizer.decode(experience.ids_T)
    assert "calculator" in one.tokenizer.decode(first)


FORGETFUL = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and not loop.last %}[...]{% else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_a_template_that_rewrites_history_makes_a_sequence_for_each_turn(toy_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(toy_model_dir)
    tokenizer.chat_template = FORGETFUL
    one = replace(tutor(toy_model_dir), tokenizer=tokenizer, renderer=Renderer(tokenizer))
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "two"},
    ]
    lesson = one.lesson(task(messages=messages))
    assert taught(one, lesson) == ["one<|im_end|>", "two<|im_end|>"]
    assert "[...]" in tokenizer.decode(lesson.experiences[1].ids_T)
    assert not any(check.broken for check in check_step([lesson], [weighted([lesson], SUPERVISED["sft"])], one))


THINKING = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and loop.last %}<think>
{{ message.reasoning_content or '' }}
</think>
{% endif %}{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>
{% endif %}{% endif -%}"""


def test_reasoning_is_taught_and_a_switched_off_one_is_context(toy_model_dir):
    """As hybrid models have it: the prompt of `enable_thinking: false` already holds the empty reasoning."""
    tokenizer = AutoTokenizer.from_pretrained(toy_model_dir)
    tokenizer.chat_template = THINKING
    one = replace(tutor(toy_model_dir), tokenizer=tokenizer, renderer=Renderer(tokenizer))
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    lesson = one.lesson(task(messages=[SEEN[0], answer]))
    assert taught(one, lesson) == ["<think>\nhm\n</think>\nyes<|im_end|>"]
    off = replace(one, template_kwargs={"enable_thinking": False})
    assert taught(off, off.lesson(task(prompt="a", response="yes"))) == ["yes<|im_end|>"]
    with pytest.raises(DatasetError, match="row train/0: the chat template writes the answer of message 1 differently"):
        off.lesson(task(messages=[SEEN[0], answer]))


def test_a_turn_without_an_end_token_is_refused(toy_model_dir):
    one = replace(tutor(toy_model_dir), end_ids=frozenset([0]))
    with pytest.raises(DatasetError, match=r"does not end message 1 with an end token of the model \(\[0\]\)"):
        one.lesson(ROWS[1])


def test_weight_zero_makes_a_turn_context(toy_model_dir):
    one = tutor(toy_model_dir)
    messages = [SEEN[0], {**SEEN[1], "weight": 0}, *SEEN[2:]]
    lesson = one.lesson(task(messages=messages))
    assert taught(one, lesson) == ["#### 4<|im_end|>"]
    assert "calculator" in one.tokenizer.decode(lesson.experiences[0].ids_T)


def test_the_last_turn_alone_is_taught_where_the_settings_say_so_and_messages_may_be_json(toy_model_dir):
    one = tutor(toy_model_dir, turns="last")
    lesson = one.lesson(task(messages=json.dumps(SEEN)))
    assert taught(one, lesson) == ["#### 4<|im_end|>"]


def test_rows_that_are_too_long_are_dropped_or_refused(toy_model_dir):
    assert tutor(toy_model_dir, max_model_len=8).lesson(task(messages=SEEN)).too_long
    with pytest.raises(DatasetError, match=r"row train/0 has \d+ tokens, but model.max_model_len is 8"):
        tutor(toy_model_dir, max_model_len=8, too_long="refuse").lesson(task(messages=SEEN))


RECORDED_IMAGE = {"type": "image_url", "image_url": {"url": "sha256:" + "0" * 64}}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "?"}, "neither 'messages' nor 'prompt'; its fields are: question"),
        ({"messages": "hello"}, "'messages' is not JSON"),
        ({"messages": "3"}, "must be a list of messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message of the assistant"),
        ({"messages": [{"role": "robot", "content": "a"}, *SEEN]}, "'robot'"),
        ({"prompt": "a"}, "it has no 'response'"),
        ({"messages": SEEN, "tools": "[{]"}, "'tools' is not JSON"),
        ({"messages": SEEN, "tools": [{"name": "f"}]}, "a tool must be a function with a name"),
        ({"messages": [SEEN[0], {"role": "assistant", "content": "a", "weight": 0}]}, "every message .* weight 0"),
        (
            {"messages": [{"role": "user", "content": [RECORDED_IMAGE]}, *SEEN[1:]]},
            "the model reads only text",
        ),
    ],
)
def test_a_row_that_cannot_be_taught_is_named(toy_model_dir, row, words):
    with pytest.raises(DatasetError, match=rf"row train/3: .*{words}"):
        tutor(toy_model_dir).lesson(task(3, **row))


def test_every_token_of_a_text_but_the_first_is_predicted_once_over_its_pieces(toy_model_dir):
    one = tutor(toy_model_dir, "texts", max_model_len=6)
    text = "question answer yes no 12345"
    ids = [*one.tokenizer(text)["input_ids"], one.tokenizer.eos_token_id]
    pieces = one.lesson(task(text=text)).experiences
    assert len(pieces) > 2
    assert [token for piece in pieces for token in piece.ids_T[piece.loss_mask_T].tolist()] == ids[1:]
    assert all(len(piece.ids_T) <= 6 for piece in pieces)
    for before, after in pairwise(pieces):
        assert before.ids_T[-1] == after.ids_T[0]


def test_the_end_of_a_text_that_fits_exactly_makes_no_empty_piece(toy_model_dir):
    one = tutor(toy_model_dir, "texts", max_model_len=4)
    assert [len(piece.ids_T) for piece in one.lesson(task(text="123")).experiences] == [4]
    assert [len(piece.ids_T) for piece in one.lesson(task(text="1234")).experiences] == [4, 2]
    assert one.lesson(task(text="")).experiences == ()
