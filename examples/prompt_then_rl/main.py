"""Tune an agent's system prompt first, then its model's weights under that prompt, and show what each step gained."""

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the examples' folder

from parts.command_line import algorithm_config, model_config, options, settings
from parts.stand_in import stand_in
from prompt_then_rl.agent import run_agent
from prompt_then_rl.proposer import Proposer
from quickstart.agent import judge

from sharpen import DatasetConfig, PromptTuneConfig, TuneResult, tune, tune_prompt

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart"
PROMPT = (
    "You are HelpBot, the assistant of a web shop. Be polite, never guess prices, and answer in full sentences. "
    "If a customer is angry, apologize first."
)
"""The prompt that the agent has: of another place, and nothing to the point."""


def main(argv: list[str] | None = None) -> tuple[str, Mapping[str, float], TuneResult]:
    """The prompt that was found, its figures, and what came of the training under it."""
    arguments = _options().parse_args(argv)
    data = str(arguments.data)
    with proposing_model(arguments) as lm:
        prompt, figures = tune_prompt(
            workflow=run_agent,
            init_system_prompt=arguments.prompt,
            judge_func=judge,
            train_dataset=DatasetConfig(path=data, split="train", total_steps=arguments.prompt_tasks),
            eval_dataset=DatasetConfig(path=data, split="test", total_steps=arguments.eval_tasks),
            config=PromptTuneConfig(
                lm_model_name=lm,
                optimizer=arguments.optimizer,
                eval_display_progress=False,
                eval_num_threads=64,
                seed=arguments.seed,
            ),
            model=model_config(arguments),
            settings={"seed": arguments.seed},
        )
    result = tune(
        workflow_func=functools.partial(run_agent, system_prompt=prompt),
        judge_func=judge,
        train_dataset=DatasetConfig(path=data, split="train", total_steps=arguments.steps),
        eval_dataset=DatasetConfig(path=data, split="test"),
        model=model_config(arguments),
        algorithm=algorithm_config(arguments),
        project_name="PromptThenRL",
        settings=settings(arguments),
    )
    print("\n".join(gains(prompt, figures, result)), flush=True)
    return prompt, figures, result


def gains(prompt: str, figures: Mapping[str, float], result: TuneResult) -> list[str]:
    """What each step gained on the same held-out tasks, sampled, with 95% intervals."""
    trained = result.verdict
    lines = [
        "",
        f"the prompt:  {figures['before']:.3f} -> {figures['after']:.3f}, "
        f"{figures['difference']:+.3g} [{figures['low']:+.3g}, {figures['high']:+.3g}]  {prompt!r}",
    ]
    if trained.difference is None:
        return [*lines, f"the weights: {trained.text}"]
    before, after = result.before["sampled"].accuracy, result.after["sampled"].accuracy
    interval = f"[{trained.low:+.3g}, {trained.high:+.3g}]"
    return [*lines, f"the weights: {before:.3f} -> {after:.3f}, {trained.difference:+.3g} {interval}  {trained.model}"]


@contextlib.contextmanager
def proposing_model(arguments: argparse.Namespace) -> Iterator[Any]:
    """The model that --lm names; without one a stand-in, for as long as the context lasts."""
    if arguments.lm is not None:
        yield arguments.lm
        return
    import dspy

    print("no --lm: a stand-in proposes prompts from a list, for trying the example out", flush=True)
    with stand_in(Proposer()) as base_url:
        yield dspy.LM("openai/stand-in", api_base=base_url, api_key="none", cache=False)


def _options() -> argparse.ArgumentParser:
    parser = options(
        __doc__,
        data=QUICKSTART / "data",
        steps=10,
        batch_size=16,
        group_size=8,
        learning_rate=3e-4,
        max_model_len=512,
        max_tokens=48,
        eval_tasks=256,
    )
    parser.add_argument("--prompt", default=PROMPT, help="system prompt to begin with (default: %(default)s)")
    parser.add_argument("--prompt-tasks", type=int, default=125, help="tasks to tune it on (default %(default)s)")
    parser.add_argument("--optimizer", choices=["miprov2", "gepa"], default="miprov2")
    parser.add_argument("--lm", help="model that proposes prompts, as DSPy names it (provider/model)")
    return parser


if __name__ == "__main__":
    main()
