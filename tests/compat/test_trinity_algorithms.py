"""Trinity-RFT's registries of algorithms in a plugin folder: each works by our doors, or is refused with the reason."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from processes import forked

PLUGIN = '''
from typing import Dict, List, Tuple

import torch
from trinity.algorithm import ADVANTAGE_FN, ALGORITHM_TYPE, KL_FN, POLICY_LOSS_FN, AlgorithmType
from trinity.algorithm.advantage_fn import GroupAdvantage
from trinity.algorithm.kl_fn.kl_fn import KLFn
from trinity.algorithm.policy_loss_fn.policy_loss_fn import PolicyLossFn
from trinity.algorithm.utils import aggregate_loss, masked_mean


@ADVANTAGE_FN.register_module("median")
class MedianAdvantage(GroupAdvantage):
    """The reward minus the median of the group."""

    def __init__(self, scale: float = 1.0, **kwargs) -> None:
        super().__init__(**kwargs)
        self.scale = scale

    def calculate_group_advantage(self, group_id: str, exps: List) -> Tuple[List, Dict]:
        rewards = torch.tensor([exp.reward for exp in exps], dtype=torch.float64)
        middle = torch.quantile(rewards, 0.5)
        for exp in exps:
            exp.advantages = self.scale * (exp.reward - middle) * exp.action_mask
            exp.returns = exp.advantages.clone()
        return exps, {"middle": middle.item()}

    @classmethod
    def default_args(cls) -> Dict:
        return {"scale": 2.0}


@POLICY_LOSS_FN.register_module("narrow")
class NarrowLoss(PolicyLossFn):
    def __init__(self, backend: str = "verl", width: float = 0.1, loss_agg_mode: str = "token-mean") -> None:
        super().__init__(backend=backend)
        self.width, self.loss_agg_mode = width, loss_agg_mode

    def __call__(self, logprob, old_logprob, action_mask, advantages, **kwargs) -> Tuple[torch.Tensor, Dict]:
        ratio = torch.exp(torch.clamp(logprob - old_logprob, -20.0, 20.0))
        first, second = -advantages * ratio, -advantages * ratio.clamp(1 - self.width, 1 + self.width)
        loss = aggregate_loss(torch.maximum(first, second), action_mask, loss_agg_mode=self.loss_agg_mode)
        clipped = masked_mean((second > first).float(), action_mask)
        return loss, {"narrow": loss.detach().item(), "clipped": clipped.item()}

    @classmethod
    def default_args(cls) -> Dict:
        return {"width": 0.1, "loss_agg_mode": "token-mean"}


@KL_FN.register_module("fourth")
class FourthFn(KLFn):
    def calculate_kl(self, logprob, ref_logprob, old_logprob=None):
        return (logprob - ref_logprob) ** 4


@ALGORITHM_TYPE.register_module("median_rl")
class MedianAlgorithm(AlgorithmType):
    """Medians, a narrow clip and a fourth power."""

    use_critic: bool = False
    use_reference: bool = True
    schema: str = "experience"

    @classmethod
    def default_config(cls) -> Dict:
        return {
            "repeat_times": 2,
            "advantage_fn": "median",
            "sample_strategy": "warmup",
            "policy_loss_fn": "narrow",
            "kl_penalty_fn": "none",
            "kl_loss_fn": "fourth",
            "entropy_loss_fn": "default",
        }
'''

REFUSED = """
from trinity.algorithm import *
from trinity.algorithm import ADVANTAGE_FN, ALGORITHM_TYPE, ENTROPY_LOSS_FN, POLICY_LOSS_FN, SAMPLE_STRATEGY
from trinity.algorithm import AdvantageFn, AlgorithmType, EntropyLossFn, PolicyLossFn, SampleStrategy


@ENTROPY_LOSS_FN.register_module("squared")
class Squared(EntropyLossFn):
    def __call__(self, entropy, action_mask, **kwargs):
        return (entropy ** 2).mean(), {}


@SAMPLE_STRATEGY.register_module("newest")
class Newest(SampleStrategy):
    async def sample(self, step, **kwargs): ...


@ADVANTAGE_FN.register_module("in_trainer")
class InTrainer(AdvantageFn):
    def __call__(self, exps, **kwargs): ...

    @classmethod
    def compute_in_trainer(cls):
        return True


@POLICY_LOSS_FN.register_module("of_experts")
class OfExperts(PolicyLossFn):
    def __call__(self, logprob, action_mask, is_expert_mask, **kwargs): ...


@ALGORITHM_TYPE.register_module("with_critic")
class WithCritic(AlgorithmType):
    use_critic = True

    @classmethod
    def default_config(cls):
        return {"advantage_fn": "ppo"}
"""
AGENT = """
from sharpen import WorkflowOutput

async def agent(task, model):
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=4
    )
    return WorkflowOutput(reward=float("e" in (reply.choices[0].message.content or "")))
"""


ENDED = "the exit code is"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("mine", PLUGIN), ("refused", REFUSED.replace("from trinity.algorithm import *\n", ""))):
        (tmp_path / "plugins").mkdir(exist_ok=True)
        (tmp_path / "plugins" / f"{name}.py").write_text(text)
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path


def python(folder: Path, code: str) -> tuple[int, str]:
    with forked("-c", f"import os\nos.dup2(1, 2)\n{code}", cwd=folder) as process:
        said, _ = process.communicate()
    return process.returncode, said


def sharpen(folder: Path, *commands: list[str]) -> list[tuple[int, str]]:
    """The exit codes of commands, one after the other in one process, and what each said."""
    code, said = python(
        folder,
        f"""
from sharpen.cli.main import main
for command in {list(commands)!r}:
    print("{ENDED}", main(command), flush=True)
""",
    )
    assert code == 0, said
    parts = re.split(rf"^{ENDED} (\d)$", said, flags=re.MULTILINE)
    return list(zip(map(int, parts[1::2]), parts[::2], strict=False))


def file(folder: Path, algorithm: str, model: object = "m", tasks: object = "t.jsonl") -> Path:
    path = folder / "run.yaml"
    path.write_text(
        f"""
project: p
name: n
checkpoint_root_dir: {folder / "runs"}
algorithm: {{repeat_times: 4, optimizer: {{lr: 1e-3}}, {algorithm}}}
model: {{model_path: {model}, max_model_len: 64, max_response_tokens: 4}}
buffer:
  batch_size: 2
  total_steps: 2
  explorer_input:
    taskset: {{path: {tasks}, split: train, default_workflow_type: "agent.py:agent"}}
"""
    )
    return path


def test_each_registered_function_keeps_our_contract(folder: Path) -> None:
    code, said = python(
        folder,
        """
from pathlib import Path
from sharpen.compat.trinity.imports.stand_in import load_plugins, stand_in
stand_in(shadow=True)
load_plugins(Path("plugins"))
from sharpen.compat.trinity.algorithms import ADVANTAGE_FN, ALGORITHM_TYPE, KL_FN, POLICY_LOSS_FN
from sharpen.learning.algorithm.presets import algorithm_named
from sharpen.learning.algorithm.returns import Scores
from sharpen.learning.algorithm.advantages import advantage_named
from sharpen.testing import check_advantage, check_algorithm, check_kl, check_policy_loss
median = ADVANTAGE_FN.place("median")
check_advantage(median, scale=0.5)
scores = Scores.of_rollouts([1.0, 2.0, 6.0, 5.0, 3.0], [0, 0, 0, 1, 1], [1, 2, 1, 1, 1])
print(advantage_named(median).function(scores, scale=2.0).tolist())
print(advantage_named(median).function(scores).tolist())
check_policy_loss(POLICY_LOSS_FN.place("narrow"), width=0.3)
check_kl(KL_FN.place("fourth"))
check_algorithm(ALGORITHM_TYPE.place("median_rl"))
print(ALGORITHM_TYPE.place("median_rl").endswith("mine.py:MedianAlgorithm.sharpen_part"))
""",
    )
    assert (code, said) == (0, "[-2.0, 0.0, 0.0, 8.0, 2.0, -2.0]\n" * 2 + "True\n")


def test_a_plugin_s_algorithm_trains_and_is_certified(folder: Path, toy_model_dir: Path, toy_dataset: Path) -> None:
    """With arguments of its functions from the file, also in the trainer's own processes."""
    functions = "algorithm_type: median_rl, advantage_fn_args: {scale: 3.0}, policy_loss_fn_args: {width: 0.2}"
    path = file(folder, functions, toy_model_dir, toy_dataset)
    plugins = ["--plugin-dir", "plugins"]
    trained, certified = sharpen(
        folder,
        ["run", "--config", str(path), *plugins, "--set", "trainer.num_processes=2"],
        ["certify", "runs/p/n", *plugins, "--no-logprobs"],
    )
    assert trained[0] == 0, trained
    resolved = json.loads((folder / "runs/p/n/resolved.json").read_text())
    assert resolved["loss.advantage_args.scale"]["value"] == 3.0
    assert resolved["algorithm.algorithm_type"]["value"].endswith("mine.py:MedianAlgorithm.sharpen_part")
    assert certified[0] == 0, certified
    assert "brings no second formula" in " ".join(certified[1].split())


def test_what_has_no_place_here_is_refused(folder: Path) -> None:
    refusals = {
        "algorithm_type: grpo, entropy_loss_fn: squared": "the entropy term is the mean entropy times",
        "algorithm_type: grpo, sample_strategy: newest": "which experiences train is decided by sampling.*",
        "algorithm_type: grpo, advantage_fn: in_trainer": "computes in the trainer, from verl's tensors",
        "algorithm_type: grpo, policy_loss_fn: of_experts": "asks for is_expert_mask: here it gets logprob,",
        "algorithm_type: with_critic": "has a critic, which only our own ppo has",
        "algorithm_type: grpo, advantage_fn: medain": "did you mean 'median'",
    }
    paths = [file(folder, functions).rename(folder / f"{number}.yaml") for number, functions in enumerate(refusals)]
    explain = [["explain", "--config", str(path), "--plugin-dir", "plugins"] for path in paths]
    for (code, said), words in zip(sharpen(folder, *explain), refusals.values(), strict=True):
        assert (code, words in " ".join(said.split())) == (2, True), said
