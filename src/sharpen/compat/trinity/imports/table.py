"""Trinity-RFT's modules and the names in them that exist here, and those of verl, which it needs.

In: nothing. Out: for each module, its names and where ours are (`module:attribute`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_HERE = "sharpen.compat.trinity"


def _from_layer(names: str) -> dict[str, str]:
    """Names that the layer itself has."""
    return {name: f"{_HERE}:{name}" for name in names.split()}


def _from(module: str, names: str) -> dict[str, str]:
    return {name: f"{_HERE}.{module}:{name}" for name in names.split()}


_RECORDS = _from_layer("Experience EID")
_TASKS = _from_layer("Task FormatConfig GenerationConfig")
_MODEL = _from_layer("ModelWrapper")
_BASES = _from_layer("Workflow MultiTurnWorkflow BaseSimpleWorkflow SimpleWorkflow AsyncSimpleWorkflow")
_MATHS = _from_layer("MathWorkflow AsyncMathWorkflow MathBoxedWorkflow AsyncMathBoxedWorkflow")
_STEPS = _from_layer(
    "StepWiseRewardWorkflow AsyncStepWiseRewardWorkflow RewardPropagationWorkflow AsyncRewardPropagationWorkflow"
)
_REWARDS = _from_layer(
    "RewardFn REWARD_FUNCTIONS MathRewardFn MathBoxedRewardFn MathDAPORewardFn AccuracyReward FormatReward "
    "CountDownRewardFn"
)
_LOGS = _from("imports.functions", "get_logger")
_WORKFLOWS = _from_layer("WORKFLOWS")
_USUAL = {**_RECORDS, **_TASKS, **_MODEL, **_BASES, **_LOGS, **_WORKFLOWS, **_REWARDS}
"""What a workflow's module imports itself, so that it can be taken from there too."""
_EVALUATION = _from(
    "imports.functions", "validate_think_pattern find_boxed_answer remove_right_units simple_answer_parser"
)
_GRADING = _from("imports.functions", "grade_answer match_answer")
_FLOWS = "trinity.common.workflows"
_ADVANTAGES = _from("algorithms", "ADVANTAGE_FN AdvantageFn GroupAdvantage")
_LOSSES = _from("algorithms", "POLICY_LOSS_FN PolicyLossFn")
_KLS = _from("algorithms", "KL_FN KLFn")
_ENTROPIES = _from("algorithms", "ENTROPY_LOSS_FN EntropyLossFn")
_STRATEGIES = _from("algorithms", "SAMPLE_STRATEGY SampleStrategy")
_ALGORITHMS = _from("algorithms", "ALGORITHM_TYPE AlgorithmType")

MODULES: Mapping[str, Mapping[str, str]] = {
    "trinity": {},
    "trinity.algorithm": {**_ADVANTAGES, **_LOSSES, **_KLS, **_ENTROPIES, **_STRATEGIES, **_ALGORITHMS},
    "trinity.algorithm.algorithm": _ALGORITHMS,
    "trinity.algorithm.advantage_fn": _ADVANTAGES,
    "trinity.algorithm.advantage_fn.advantage_fn": _ADVANTAGES,
    "trinity.algorithm.policy_loss_fn": _LOSSES,
    "trinity.algorithm.policy_loss_fn.policy_loss_fn": _LOSSES,
    "trinity.algorithm.kl_fn": _KLS,
    "trinity.algorithm.kl_fn.kl_fn": _KLS,
    "trinity.algorithm.entropy_loss_fn": _ENTROPIES,
    "trinity.algorithm.entropy_loss_fn.entropy_loss_fn": _ENTROPIES,
    "trinity.algorithm.sample_strategy": _STRATEGIES,
    "trinity.algorithm.sample_strategy.sample_strategy": _STRATEGIES,
    "trinity.algorithm.utils": _from("algorithms", "aggregate_loss masked_mean"),
    "trinity.common": {},
    "trinity.common.config": _from_layer("FormatConfig GenerationConfig"),
    "trinity.common.constants": _from("imports.functions", "TASKSET_PATH_ENV_VAR PLUGIN_DIRS_ENV_VAR"),
    "trinity.common.experience": _RECORDS,
    "trinity.common.models": _MODEL,
    "trinity.common.models.mm_utils": _from("workflows.pictures", "build_mm_message"),
    "trinity.common.models.model": _MODEL,
    "trinity.common.rewards": _REWARDS,
    "trinity.common.rewards.reward_fn": _REWARDS,
    "trinity.common.rewards.accuracy_reward": _REWARDS,
    "trinity.common.rewards.countdown_reward": _REWARDS,
    "trinity.common.rewards.dapo_reward": _REWARDS,
    "trinity.common.rewards.format_reward": _REWARDS,
    "trinity.common.rewards.math_reward": _REWARDS,
    "trinity.common.rewards.eval_utils": _EVALUATION,
    "trinity.common.rewards.naive_dapo_score": _GRADING,
    "trinity.common.rewards.qwen25_eval": _from("imports.functions", "verify_math_answer extract_answer fix_fracs"),
    "trinity.utils.eval_utils": _EVALUATION,
    _FLOWS: {**_USUAL, **_MATHS, **_STEPS},
    f"{_FLOWS}.workflow": {**_USUAL, **_MATHS},
    f"{_FLOWS}.step_wise_workflow": {**_USUAL, **_STEPS},
    f"{_FLOWS}.customized_math_workflows": {**_USUAL, **_MATHS},
    f"{_FLOWS}.customized_toolcall_workflows": {**_USUAL, **_from("workflows.tool_calls", "ToolCallWorkflow")},
    f"{_FLOWS}.eval_workflow": {**_USUAL, **_from("workflows.maths", "MathEvalWorkflow AsyncMathEvalWorkflow")},
    f"{_FLOWS}.math_rm_workflow": {**_USUAL, **_from("workflows.maths", "MathRMWorkflow AsyncMathRMWorkflow")},
    f"{_FLOWS}.math_ruler_workflow": {
        **_USUAL,
        **_from("workflows.ruler", "MathRULERWorkflow AsyncMathRULERWorkflow"),
    },
    f"{_FLOWS}.rubric_judge_workflow": {
        **_USUAL,
        **_from("workflows.rubric", "RubricJudgeWorkflow RubricJudgeWorkflowWithAPI"),
    },
    f"{_FLOWS}.simple_mm_workflow": {
        **_USUAL,
        **_from("workflows.pictures", "SimpleMMWorkflow AsyncSimpleMMWorkflow"),
    },
    f"{_FLOWS}.on_policy_distill_workflow": {
        **_USUAL,
        **_from("simple", "OnPolicyDistillWorkflow OnPolicyDistillMathWorkflow"),
    },
    f"{_FLOWS}.agentscope": {},
    f"{_FLOWS}.agentscope.react": {},
    f"{_FLOWS}.agentscope.react.react_agent": _from_layer("AgentScopeReActAgent"),
    f"{_FLOWS}.agentscope.react.react_workflow": {**_USUAL, **_from_layer("AgentScopeReActWorkflow")},
    f"{_FLOWS}.envs": {},
    f"{_FLOWS}.envs.agentscope": {},
    f"{_FLOWS}.envs.agentscope.agentscopev0_react_workflow": {
        **_USUAL,
        **_from("workflows.react_math", "AgentScopeV0ReactMathWorkflow"),
    },
    f"{_FLOWS}.envs.agentscope.agentscopev1_react_workflow": {
        **_USUAL,
        **_from("workflows.react_math", "AgentScopeReactMathWorkflow"),
    },
    f"{_FLOWS}.envs.agentscope.agentscopev1_search_workflow": {
        **_USUAL,
        **_from("workflows.web_search", "AgentScopeV1ReactSearchWorkflow"),
    },
    f"{_FLOWS}.envs.email_searcher": {},
    f"{_FLOWS}.envs.email_searcher.react_agent": _from("workflows.email_search", "EmailSearchAgent"),
    f"{_FLOWS}.envs.email_searcher.workflow": {**_USUAL, **_from("workflows.email_search", "EmailSearchWorkflow")},
    f"{_FLOWS}.envs.sudoku": {},
    f"{_FLOWS}.envs.sudoku.sudoku_workflow": {**_USUAL, **_from("workflows.sudoku", "SudokuWorkflow")},
    "trinity.plugins": {},
    "trinity.utils": {},
    "trinity.utils.log": _LOGS,
    "trinity.utils.registry": _from("registry", "Registry"),
    "verl": {},
    "verl.utils": {},
    "verl.utils.py_functional": _from("imports.functions", "timeout_limit"),
    "verl.utils.reward_score": {},
    "verl.utils.reward_score.prime_math": {},
    "verl.utils.reward_score.prime_math.grader": _from("imports.functions", "math_equal"),
}


def modules_with(name: str) -> Sequence[str]:
    """The modules that have a name: first those that are its home in Trinity-RFT, which have the fewest names."""
    return sorted((module for module, names in MODULES.items() if name in names), key=lambda key: len(MODULES[key]))
