"""Trinity's reward functions and mathematical equality, with hand-computed scores."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sharpen.compat.trinity import (
    REWARD_FUNCTIONS,
    AccuracyReward,
    CountDownRewardFn,
    FormatReward,
    MathBoxedRewardFn,
    MathDAPORewardFn,
    MathRewardFn,
)
from sharpen.compat.trinity import equality as equality_module
from sharpen.compat.trinity.equality import bare, equal, number_in
from sharpen.compat.trinity.rewards import answer_in_tags, last_boxed, truth_in

SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72"


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, \{2\}\}}", r"\{1, \{2\}\}"),
        (r"\boxed{a{b{c}d}e}.", "a{b{c}d}e"),
        (r"\fbox{ 7 }", "7"),
        (r"\boxed {7}", "7"),
        (r"$\boxed 7$", "7"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{42", None),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed{}", ""),
        (r"\boxed", None),
        (r"\boxed7", None),
        ("42", None),
        ("", None),
    ],
)
def test_the_last_box(text: str, box: str | None):
    assert last_boxed(text) == box


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        (SOLUTION, "72"),
        ("#### -1,234.5", "-1,234.5"),
        ("a #### b\n#### 3", "3"),
        (r"Thus \boxed{\frac12}", r"\frac12"),
        ("  72 ", "72"),
        (72, "72"),
        (0.5, "0.5"),
    ],
)
def test_the_answer_in_a_truth(truth: Any, answer: str):
    assert truth_in(truth) == answer


def test_a_truth_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match=r"the task has no truth: task_args\.response_key"):
        MathBoxedRewardFn()(response=r"\boxed{1}", truth=None)


EQUAL = [
    ("42", "42"),
    ("42.0", "42"),
    ("042", "42"),
    ("+42", "42"),
    ("1,000", "1000"),
    ("1,234,567.50", "1234567.5"),
    ("-3", "-3"),
    ("−3", "-3"),
    ("- 3", "-3"),
    ("$42$", "42"),
    (r"\$42", "42"),
    (r"\(42\)", "42"),
    (r"\[ 42 \]", "42"),
    ("42.", "42"),
    (r"42\text{ cm}", "42"),
    (r"42\ \text{cm}", r"42 \mathrm{cm}"),
    (r"42 \text{ cm}^2", "42"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90"),
    (r"50\%", "50"),
    ("50%", "0.5"),
    ("0.5", r"50\%"),
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac{1}{2}", "1/2"),
    (r"-\frac{2}{4}", "-0.5"),
    (".5", "0.5"),
    ("B", "B"),
    (r"10\!,000", "10000"),
    (r"10,\!000", "10000"),
    (r"10{,}000", "10000"),
]
DIFFERENT = [
    ("42", "43"),
    ("-3", "3"),
    ("1/3", "0.3333"),
    ("0.5", "50"),
    ("50", "0.5"),
    (r"50\%", "5000"),
    ("50", r"0.5\%"),
    (r"42\text{ cm}", r"42\text{ m}"),
    ("1,00", "100"),
    ("", "5"),
    ("5", ""),
]
BY_MATH_VERIFY = [
    ("x + 1", "1 + x", True),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    (r"\frac12", "0.5", True),
    ("x = 5", "5", True),
    ("(1,2)", "(1, 2)", True),
    (r"\{1,2\}", r"\{2,1\}", True),
    (r"\text{B}", "B", True),
    ("(1,2)", "(2,1)", False),
    ("x + 1", "x - 1", False),
    ("3 or 5", "5", False),
    (r"5 \text{ or } 3", "5", False),
    ("5 6", "56", False),
    ("2 pi", "2", False),
    ("{5", "6", False),
    ("the answer", "5", False),
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_equal_without_any_library(answer: str, truth: str):
    assert bare(answer) == bare(truth) or (number_in(bare(answer)) and number_in(bare(truth)))
    assert equal(answer, truth)
    assert equal(truth, answer)


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_different(answer: str, truth: str):
    assert not equal(answer, truth)


@pytest.mark.parametrize(("answer", "truth", "same"), BY_MATH_VERIFY)
def test_expressions_are_compared_by_math_verify(answer: str, truth: str, same: bool):
    assert equal(answer, truth) is same


def test_an_expression_that_never_ends_is_not_equal_and_others_go_on(caplog):
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "sharpen.rewards"):
        assert not equal("9^{9^{9^{9}}}", "5")
    assert time.monotonic() - began < equality_module.LIMIT_S + 120
    assert "takes longer than 3 s: not equal" in caplog.text
    assert equal("y + 1", "1 + y")


def test_many_threads_ask_at_once():
    pairs = [(f"z + {i}", f"{i} + z", True) for i in range(12)] + [
        (f"z + {i}", f"z - {i + 1}", False) for i in range(12)
    ]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda pair: equal(pair[0], pair[1]), pairs)) == [same for _, _, same in pairs]


def test_without_math_verify_the_functions_say_so():
    code = (
        "import sys; sys.modules['math_verify'] = None\n"
        "from sharpen.compat.trinity import AccuracyReward, FormatReward, MathBoxedRewardFn, MathRewardFn\n"
        "from sharpen.config.extras import install_command\n"
        "from sharpen.errors import ConfigError\n"
        "FormatReward()\n"
        "for function in (MathBoxedRewardFn, MathRewardFn, AccuracyReward):\n"
        "    try:\n        function()\n"
        "    except ConfigError as error:\n        assert install_command('math') in str(error)\n"
        "    else:\n        raise AssertionError(function)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("response", "options", "scores"),
    [
        (r"The result is \boxed{72}.", {}, (1.0, 0.0)),
        (r"The result is \boxed{72.00}.", {}, (1.0, 0.0)),
        (r"The result is \boxed{\$72}.", {}, (1.0, 0.0)),
        (r"The result is \boxed{73}.", {}, (0.0, 0.0)),
        (r"\boxed{72} no: \boxed{73}", {}, (0.0, 0.0)),
        ("The result is 72.", {}, (0.0, 0.0)),
        ("", {}, (0.0, 0.0)),
        (None, {}, (0.0, 0.0)),
        (r"\boxed{72}", {"with_think": True}, (1.0, -0.1)),
        (r"<think>48 + 24</think>\boxed{72}", {"with_think": True}, (1.0, 0.0)),
        (r"</think><think>\boxed{72}", {"with_think": True, "format_score_coef": 0.3}, (1.0, -0.3)),
        (r"<think><think></think>\boxed{72}", {"with_think": True}, (1.0, -0.1)),
        (r"\boxed{72}", {"with_think": False, "prompt": "?", "info": {}}, (1.0, 0.0)),
    ],
)
def test_the_boxed_reward(response: str | None, options: Any, scores: tuple[float, float]):
    found = MathBoxedRewardFn()(response=response, truth=SOLUTION, **options)
    assert found == {"accuracy": scores[0], "format_score": scores[1]}
    assert sum(found.values()) == sum(scores)


def test_the_accuracy_reward():
    assert AccuracyReward()(r"\boxed{\frac{1}{2}}", "?", "0.5") == {"accuracy": 1.0}
    assert AccuracyReward()(response="0.5", truth="0.5") == {"accuracy": 0.0}  # nothing is boxed
    parsed = AccuracyReward(answer_parser=lambda text: text.split()[-1])
    assert parsed(response="I say 5", truth="it is 5") == {"accuracy": 1.0}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>\nso\n</think>\n<answer>\n5\n</answer>", 0.1),
        ("<think>so</think>\n<answer>5</answer>", -0.1),
        ("First: <think>\nso\n</think>\n<answer>\n5\n</answer>", -0.1),
        ("", -0.1),
        (None, -0.1),
    ],
)
def test_the_format_reward(response: str | None, score: float):
    assert FormatReward()(response=response, truth="5") == {"format_score": score}
    assert FormatReward(pattern=r"\d+$")(response="12") == {"format_score": 0.1}


@pytest.mark.parametrize(
    ("response", "accuracy", "format_score"),
    [
        ("<think>so</think> <answer>72</answer>", 1.0, 0.1),
        (r"<think>so</think><answer>\boxed{72}</answer>", 1.0, 0.1),
        ("<think>so</think><answer>73</answer>", 0.0, 0.1),
        ("<answer>72</answer>", 1.0, -0.1),
        ("<answer>\n72\n</answer> that is it", 1.0, -0.1),
        ("72", 1.0, -0.1),
        (None, 0.0, -0.1),
    ],
)
def test_the_math_reward(response: str | None, accuracy: float, format_score: float):
    found = MathRewardFn()(response=response, truth=SOLUTION)
    assert found == {"accuracy": accuracy, "format_score": format_score}


@pytest.mark.parametrize(
    "sentence",
    [
        "72 clips",
        "$72 dollars",
        "**72**",
        "Total: 72",
        "72 (clips)",
        "about 72",
        "It is 72 clips.",
        "She sold 48 in April and 24 in May, so 72",
        "Natalia sold 48/2 = 24 clips in May. 48+24 = 72 clips",
        "€72",
        "72 km/h",
        "72 apples",
    ],
)
def test_the_math_reward_reads_the_answer_in_a_sentence(sentence: str):
    """Scores as Trinity-RFT 0.6.0's `math_reward` gave them (with its own code, run beside ours); and the same sentence
    with another number is wrong."""
    text = f"<think>so</think><answer>{sentence}</answer>"
    assert MathRewardFn()(response=text, truth=SOLUTION)["accuracy"] == 1.0
    assert MathRewardFn()(response=text.replace("72", "73"), truth=SOLUTION)["accuracy"] == 0.0


@pytest.mark.parametrize("box", ["72 clips", "72 dollars", r"72\text{ clips}", "72 km/h"])
def test_a_box_may_hold_a_unit_in_words(box: str):
    assert MathBoxedRewardFn()(response=f"so \\boxed{{{box}}}", truth="72")["accuracy"] == 1.0
    assert MathBoxedRewardFn()(response=f"so \\boxed{{{box}}}", truth="73")["accuracy"] == 0.0


@pytest.mark.parametrize("sentence", ["no number", "172", "72.5", "-72", "72 or 73", "seventy-two", "", "1,072"])
def test_the_math_reward_takes_no_other_answer(sentence: str):
    text = f"<think>so</think><answer>{sentence}</answer>"
    assert MathRewardFn()(response=text, truth=SOLUTION)["accuracy"] == 0.0


def test_the_answer_in_tags():
    assert answer_in_tags("<answer>1</answer><answer>2</answer>") == "1"
    assert answer_in_tags(r"no tags \boxed{3}") == "3"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("thinking\n<answer>(3 + 5) * 2</answer>", 1.0),
        ("<answer>3 * 5 + 2</answer>", 0.1),
        ("<answer>8 * 2</answer>", 0.1),
        ("<answer>3 + 5 + 2 + 2</answer>", 0.1),
        ("<answer>(3 + 5) * 2 / 0</answer>", 0.1),
        ("<answer>(3 + 5)**2</answer>", 0.1),
        ("<answer>__import__('os')</answer>", 0.1),
        ("<answer>(3 + 5) * 2</answer>\nafter it", 0.0),
        ("16", 0.0),
        (None, 0.0),
    ],
)
def test_the_countdown_reward(response: str | None, score: float):
    truth = '{"target": 16, "numbers": [2, 3, 5]}'
    assert CountDownRewardFn()(response=response, truth=truth) == {"score": score}


def test_the_registered_names():
    maths = ["math_boxed_reward", "math_dapo_reward", "math_reward"]
    names = ["accuracy_reward", "countdown_reward", "format_reward", *maths]
    assert REWARD_FUNCTIONS.names() == [*names, "rm_gallery_reward"]
    classes = [AccuracyReward, CountDownRewardFn, FormatReward, MathBoxedRewardFn, MathDAPORewardFn, MathRewardFn]
    assert [REWARD_FUNCTIONS.get(name) for name in names] == classes
