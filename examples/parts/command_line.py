"""What the examples' `main.py` files have in common: their options, and the settings made of them.

In: the command line. Out: an `argparse` parser, the model and algorithm settings, the auxiliary model that judges.
"""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parts.stand_in import Reply, stand_in

from sharpen import AlgorithmConfig, TunerModelConfig
from sharpen.config.run import AuxiliaryModelConfig

TINY_MODEL = str(Path(__file__).resolve().parents[1] / "quickstart" / "model")
"""The model in this repository, 2M parameters: enough to see every part run, too small to learn most tasks."""


def options(
    description: str | None,
    *,
    data: Path | None,
    model: str = TINY_MODEL,
    steps: int = 2,
    batch_size: int = 4,
    group_size: int = 4,
    learning_rate: float = 1e-6,
    max_model_len: int = 1024,
    max_tokens: int = 32,
    eval_tasks: int = 64,
) -> argparse.ArgumentParser:
    """A parser with the options that every example has; the arguments are their defaults. `data` None: the example has
    no folder of tasks."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--model", default=model, help="model to tune: a folder, or a name on the hub")
    if data is not None:
        parser.add_argument("--data", type=Path, default=data, help="folder of the tasks (default %(default)s)")
    parser.add_argument("--steps", type=int, default=steps, help="training steps (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=batch_size, help="tasks of one step (default %(default)s)")
    parser.add_argument("--group-size", type=int, default=group_size, help="rollouts of one task (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=learning_rate, help="(default %(default)s)")
    parser.add_argument("--max-model-len", type=int, default=max_model_len, help="tokens of a conversation, at most")
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="tokens of one reply, at most")
    parser.add_argument("--eval-tasks", type=int, default=eval_tasks, help="held-out tasks (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="checkpoints", help="folder of all runs (default %(default)s)")
    return parser


def with_judge(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The same parser with the options that name the model which judges."""
    parser.add_argument("--judge", help="model that judges: a folder, a name on the hub, or the endpoint's name for it")
    parser.add_argument("--judge-url", help="OpenAI-compatible endpoint that serves --judge; without it, it runs here")
    parser.add_argument("--judge-key-env", help="environment variable that holds the endpoint's key")
    parser.add_argument(
        "--judge-max-model-len", type=int, default=4096, help="tokens of its calls (default %(default)s)"
    )
    parser.add_argument(
        "--judge-temperature", type=float, help="default: 0 where it runs here, the endpoint's own elsewhere"
    )
    return parser


def model_config(arguments: argparse.Namespace) -> TunerModelConfig:
    """The model to tune."""
    return TunerModelConfig(
        model_path=arguments.model, max_model_len=arguments.max_model_len, max_tokens=arguments.max_tokens
    )


def algorithm_config(arguments: argparse.Namespace) -> AlgorithmConfig:
    """GRPO over conversations of several calls."""
    return AlgorithmConfig(
        algorithm_type="multi_step_grpo",
        batch_size=arguments.batch_size,
        group_size=arguments.group_size,
        learning_rate=arguments.learning_rate,
    )


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What else the options say, for `tune(settings=...)`."""
    return {
        "seed": arguments.seed,
        "checkpoint_root_dir": arguments.out,
        "evaluation": {"max_tasks": arguments.eval_tasks},
    }


@contextlib.contextmanager
def judge_config(arguments: argparse.Namespace, rule: Reply) -> Iterator[AuxiliaryModelConfig]:
    """The model that --judge names; without one, a stand-in that answers by `rule` for as long as the context lasts."""
    if arguments.judge is None:
        if arguments.judge_url is not None:
            raise SystemExit("--judge-url needs --judge: what the endpoint calls the model")
        print("no --judge: a stand-in that answers by rule, for trying the example out", flush=True)
        with stand_in(rule) as base_url:
            yield AuxiliaryModelConfig(model_path="stand-in", max_model_len=4096, base_url=base_url)
        return
    sampling: dict[str, Any] = {}
    if arguments.judge_temperature is not None:
        sampling["temperature"] = arguments.judge_temperature
    elif arguments.judge_url is None:
        sampling = {"temperature": 0.0, "max_tokens": arguments.judge_max_model_len // 4}
    yield AuxiliaryModelConfig(
        model_path=arguments.judge,
        max_model_len=arguments.judge_max_model_len,
        base_url=arguments.judge_url,
        api_key_env=arguments.judge_key_env,
        **sampling,
    )
