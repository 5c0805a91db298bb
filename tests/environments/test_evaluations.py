"""The world's evaluations on a served model, each by the documented command: Inspect's and the LM Evaluation Harness'.
Their programs run as processes beside `sharpen serve`, at the same time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import yaml
from processes import line_of, python
from transformers import AutoModelForCausalLM, AutoTokenizer

BIN = Path(sys.executable).parent
NAME, KEY = "mine", "at-of-this-test"
CHOICES = [" yes", " no", " the answer is no"]
QUESTIONS = ["question yes no", "tool system", "who is the user"]
CHAT = {"max_tokens": 6, "temperature": 0.0}
TASK = '''
import json
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import match
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

@tool
def switch():
    async def execute(on: bool) -> str:
        """Turn the light on or off.

        Args:
            on: Whether the light is to be on.
        """
        return "done"
    return execute

@task
def said():
    rows = [json.loads(line) for line in open("rows.jsonl")]
    return Task(dataset=[Sample(input=row["question"], target=row["said"]) for row in rows],
                scorer=match("exact"), config=GenerateConfig(max_tokens=6))

@task
def tools():
    return Task(
        dataset=[Sample(input="light", target="done")],
        solver=[use_tools(switch(), tool_choice="any"), generate(tool_calls="single")],
        scorer=match(),
        config=GenerateConfig(max_tokens=200),
    )
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The folder in which both programs have written what they found, and what each said."""

    folder: Path
    said: Mapping[str, str]


@pytest.fixture(scope="module")
def evaluated(toy_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluated]:
    """Everything is evaluated once. Of three questions the last one's target is not what the model says."""
    folder = tmp_path_factory.mktemp("evaluations")
    serve = ("-m", "sharpen.cli.main", "serve", str(toy_model_dir), "--port", "0", "--name", NAME, "--api-key", KEY)
    with python(*serve) as server:
        while not (line := line_of(server)).startswith("serving"):
            pass
        url = line.split()[3]
        write_tasks(folder, url)
        environment = {
            **os.environ,
            "OPENAI_API_KEY": KEY,
            "SHARPEN_API_KEY": KEY,
            "SHARPEN_BASE_URL": url,
            "HF_HOME": str(folder / "hub"),
            "HF_HUB_OFFLINE": "1",
        }
        lm_eval = [str(BIN / "lm_eval"), "run", "--include_path", ".", "--log_samples"]
        model = f"model={NAME},num_concurrent=4,base_url={url}"
        likelihood = f"{model}/completions,tokenizer={toy_model_dir},max_length=512"
        chat = f"{model}/chat/completions"
        commands = {
            "likelihood": [*lm_eval, "--model", "local-completions", "--model_args", likelihood,
                           "--tasks", "choices", "--output_path", "likelihood"],
            "chat": [*lm_eval, "--model", "local-chat-completions", "--model_args", chat, "--apply_chat_template",
                     "--tasks", "said", "--output_path", "chat"],
            "inspect": [str(BIN / "inspect"), "eval", "task.py", "--model", f"openai-api/sharpen/{NAME}",
                        "--log-dir", "logs", "--log-format", "json", "--display", "plain", "--temperature", "0"],
        }  # fmt: skip
        running = {
            name: subprocess.Popen(
                command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            for name, command in commands.items()
        }
        said = {name: process.communicate(timeout=240)[0] for name, process in running.items()}
        for name, process in running.items():
            assert process.returncode == 0, said[name]
        yield Evaluated(folder=folder, said=said)


def write_tasks(folder: Path, url: str) -> None:
    """Write the rows, the harness' two tasks, and Inspect's file."""
    client = openai.OpenAI(base_url=url, api_key=KEY)
    rows = []
    for question in QUESTIONS:
        reply = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": question}], **CHAT)
        said = (reply.choices[0].message.content or "") if question != QUESTIONS[-1] else "something else"
        rows.append({"question": question, "said": said, "choices": CHOICES, "label": 0})
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choices = {
        **common,
        "task": "choices",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    said = {
        **common,
        "task": "said",
        "output_type": "generate_until",
        "doc_to_target": "said",
        "generation_kwargs": {"until": ["<|im_end|>"], "max_gen_toks": CHAT["max_tokens"], "temperature": 0.0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    for task in (choices, said):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    (folder / "task.py").write_text(TASK)


def found_by_lm_eval(folder: Path, task: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The task's results, and its samples in their order."""
    (results,), (samples,) = folder.rglob("results_*.json"), folder.rglob(f"samples_{task}_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    return json.loads(results.read_text())["results"][task], sorted(lines, key=lambda line: line["doc_id"])


@torch.no_grad()
def likelihood(model: Any, tokenizer: Any, context: str, choice: str) -> tuple[float, bool]:
    """The logprob of a continuation, and whether it is what greedy sampling says: by transformers alone."""
    before = tokenizer.encode(context, add_special_tokens=False)
    ids = tokenizer.encode(context + choice, add_special_tokens=False)
    log = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    places = range(len(before), len(ids))
    total = sum(float(log[place - 1, ids[place]]) for place in places)
    return total, all(int(log[place - 1].argmax()) == ids[place] for place in places)


def test_likelihoods_are_those_of_transformers(evaluated: Evaluated, toy_model_dir: Path) -> None:
    """Of every choice of every question, and so the accuracy. Red with a logprob that is one place off."""
    model = AutoModelForCausalLM.from_pretrained(toy_model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(toy_model_dir)
    results, samples = found_by_lm_eval(evaluated.folder / "likelihood", "choices")
    right = 0
    for question, sample in zip(QUESTIONS, samples, strict=True):
        expected = [likelihood(model, tokenizer, question, choice) for choice in CHOICES]
        reported = [(float(value), str(greedy) == "True") for ((value, greedy),) in sample["resps"]]
        assert [value for value, _ in reported] == pytest.approx([value for value, _ in expected], abs=1e-4)
        assert [greedy for _, greedy in reported] == [greedy for _, greedy in expected]
        right += max(range(3), key=lambda choice: expected[choice][0]) == 0
    assert results["acc,none"] == pytest.approx(right / 3)


def test_chats_are_scored_by_the_harness(evaluated: Evaluated) -> None:
    results, samples = found_by_lm_eval(evaluated.folder / "chat", "said")
    assert results["exact_match,none"] == pytest.approx(2 / 3)
    assert [sample["exact_match"] for sample in samples] == [1.0, 1.0, 0.0]


def test_inspect_scores_answers_and_runs_tools(evaluated: Evaluated) -> None:
    """A tool is called as Inspect's own `tool_choice` demands, and its result is in the conversation."""
    logs = {log["eval"]["task"]: log for file in (evaluated.folder / "logs").glob("*.json") if (log := read(file))}
    assert {log["status"] for log in logs.values()} == {"success"}
    (scored,) = logs["said"]["results"]["scores"]
    assert scored["metrics"]["accuracy"]["value"] == pytest.approx(2 / 3)
    (sample,) = logs["tools"]["samples"]
    calls = [call["function"] for message in sample["messages"] for call in message.get("tool_calls") or ()]
    results = [message["content"] for message in sample["messages"] if message["role"] == "tool"]
    assert (calls, results) == (["switch"], ["done"])


def read(file: Path) -> Any:
    return json.loads(file.read_text())
