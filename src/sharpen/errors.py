"""The error tree: one root class; each error is also the standard error that it is a kind of.

    SharpenError
    ├── invalid input
    │   ├── ConfigError (ValueError)           a setting or an argument
    │   ├── NotIncludedError (ImportError)     a name of AgentScope's tuner that Sharpen does not have
    │   ├── DatasetError (ValueError)          a dataset, or a row of it
    │   │   └── DatasetNotFoundError (FileNotFoundError)   its path does not exist
    │   ├── ModelError (ValueError)            a model directory
    │   ├── CommandError (ValueError)          a command of `model.run`, its files or its limits
    │   ├── ImageError (ValueError)            an image that cannot be read
    │   └── SamplingError (ValueError)         sampling that is not supported or cannot be trained on
    │       └── ConstraintError                an answer's schema or grammar
    ├── caused by the model: becomes the rollout's outcome, and the run continues
    │   ├── UnusableAnswerError (ValueError)   raised by workflows, tools and judges
    │   └── ContextOverflowError (ValueError)  a prompt that does not fit
    ├── failures of serving, training or storage
    │   ├── EngineError (RuntimeError)
    │   │   └── EngineLostError                the engine can serve no more requests
    │   ├── SandboxError (RuntimeError)        where a command runs failed, not the command
    │   ├── RankError (RuntimeError)           a process of a trainer with several processes
    │   ├── OperatorError (RuntimeError)       an operator on tasks or rollouts failed, or did what it may not
    │   ├── RolloutError (RuntimeError)        too many rollouts failed
    │   │   └── TokenCapError                  an auxiliary model has used up its tokens
    │   ├── CheckpointError (OSError)          not completely written, or not readable
    │   └── JournalError (OSError)             `run.db` could not be written or read
    └── results that must not be trained on
        ├── CallError (ValueError)             a recorded call without its logprobs
        ├── ParityError (AssertionError)       trainer and engine do not compute the same model
        ├── GradientError (AssertionError)     the trainer's gradient is not that of a plain loop
        ├── CertificateError (AssertionError)  an invariant of the run certificate is broken
        ├── TrainingError (ArithmeticError)    a gradient that is not finite
        ├── JudgeError (ValueError)            a judge gave no verdict, or agrees too little with its owner
        └── NoSignalError (RuntimeError)       nothing can be learnt of the rollouts of the first check

All of them pickle, since they cross threads and processes. Their messages say what was wrong, the value, and what to
do.
"""


class SharpenError(Exception):
    """Root of every error that Sharpen raises on purpose."""


class ConfigError(SharpenError, ValueError):
    """A setting or argument is unknown, of the wrong kind, or contradicts another one."""


class NotIncludedError(SharpenError, ImportError):
    """A name of AgentScope's tuner, or of Trinity-RFT, that Sharpen does not have."""


class DatasetError(SharpenError, ValueError):
    """A dataset cannot be read, is empty, or a row lacks a field."""


class DatasetNotFoundError(DatasetError, FileNotFoundError):
    """A dataset's path does not exist."""


class ModelError(SharpenError, ValueError):
    """A model directory cannot be used: missing files, no chat template, or an unsupported architecture."""


class CommandError(SharpenError, ValueError):
    """A command cannot be started as it was given: not found, files outside of its folder, limits below 0."""


class ImageError(SharpenError, ValueError):
    """An image cannot be read: unknown format, broken, too large; or it has no place in its prompt."""


class SamplingError(SharpenError, ValueError):
    """Sampling parameters are not supported, or the chosen algorithm cannot train on their tokens."""


class ConstraintError(SamplingError):
    """An answer cannot be constrained as asked: its schema cannot be compiled, or its tokens were not sampled so."""


INVALID_INPUT = (ConfigError, DatasetError, ModelError, SamplingError)
"""Errors of what a user gave: their messages name it, and need no traceback."""


class UnusableAnswerError(SharpenError, ValueError):
    """The model's answer cannot be used: raise it in a workflow, a tool or a judge (`docs/use/failures.md`).

    The rollout then counts as failed by the model: it gets `rollout.failure_reward`, or is excluded, and is not
    retried.
    """


class ContextOverflowError(SharpenError, ValueError):
    """A prompt (or prompt plus requested tokens) does not fit the model's context."""


class EngineError(SharpenError, RuntimeError):
    """The inference engine failed or was closed."""


class EngineLostError(EngineError):
    """The inference engine can serve no more requests: its processes died, or it was closed."""


class ParityError(SharpenError, AssertionError):
    """The trainer's logprobs differ from the engine's by more than the tolerance."""


class GradientError(SharpenError, AssertionError):
    """Before training, the trainer's gradient of a small batch is not that of a plain loop. Nothing was trained."""


class CertificateError(SharpenError, AssertionError):
    """An invariant of the run certificate is broken. Nothing was trained on the data in question."""


class TrainingError(SharpenError, ArithmeticError):
    """An update is impossible since a gradient is NaN or infinite. No weight was changed."""


class SandboxError(SharpenError, RuntimeError):
    """What runs a command failed: its keeper was killed, or there is no container runtime."""


class RankError(SharpenError, RuntimeError):
    """One process of a distributed trainer was lost or failed. The run ends, and can resume from its last
    checkpoint."""


class CallError(SharpenError, ValueError):
    """A recorded call cannot be trained on (missing or non-finite logprobs, mismatched lengths)."""


class OperatorError(SharpenError, RuntimeError):
    """An operator on tasks or rollouts raised, or changed what is not its to change."""


class CheckpointError(SharpenError, OSError):
    """A checkpoint could not be written completely, or not read."""


class JournalError(SharpenError, OSError):
    """The journal of a run (`run.db`) could not be written or read. Only what is in it may be trained on."""


class RolloutError(SharpenError, RuntimeError):
    """Too many rollouts failed for the run to continue."""


class TokenCapError(RolloutError):
    """An auxiliary model has used up its tokens (`max_total_tokens`), so the run stops."""


class JudgeError(SharpenError, ValueError):
    """A judge gave no verdict, or agrees less with what its owner marked than `judge_floor` asks for."""


class NoSignalError(SharpenError, RuntimeError):
    """The rollouts of the pre-flight check have no signal: the model was never called, no call can be trained, or every
    reward was the same."""
