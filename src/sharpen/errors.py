"""The error tree: one root, each child also the standard error it is a kind of.

    SharpenError
    ├── what was asked for cannot be
    │   ├── ConfigError (ValueError)           a setting or an argument
    │   ├── NotIncludedError (ImportError)     a name of AgentScope's tuner that is not here
    │   ├── DatasetError (ValueError)          a dataset, or a row of it
    │   │   └── DatasetNotFoundError (FileNotFoundError)   its path is not there
    │   ├── ModelError (ValueError)            a model directory
    │   └── SamplingError (ValueError)         sampling that cannot be honoured, or not be trained on
    ├── what the model did: the rollout's outcome, and the run goes on
    │   ├── UnusableAnswerError (ValueError)   raised by workflows, tools and judges
    │   └── ContextOverflowError (ValueError)  a prompt that does not fit
    ├── what served or trained broke
    │   ├── EngineError (RuntimeError)
    │   │   └── EngineLostError                that engine will serve nothing any more
    │   ├── RankError (RuntimeError)           a process of a trainer of several
    │   ├── RolloutError (RuntimeError)        too many rollouts failed
    │   │   └── TokenCapError                  an auxiliary model has used up its tokens
    │   ├── CheckpointError (OSError)          not written whole, or not read back
    │   └── JournalError (OSError)             `run.db` could not be written or read
    └── what was found must not be trained on
        ├── CallError (ValueError)             a recorded call without its logprobs
        ├── ParityError (AssertionError)       trainer and engine do not compute the same model
        ├── CertificateError (AssertionError)  an invariant of the run certificate is broken
        ├── TrainingError (ArithmeticError)    a gradient that is not finite
        └── NoSignalError (RuntimeError)       every reward of the first check was the same

In: nothing. Out: exceptions that pickle (they cross threads and processes) and whose message says what was wrong,
the value that came, and what to do.
"""


class SharpenError(Exception):
    """Root of every error that Sharpen raises on purpose."""


class ConfigError(SharpenError, ValueError):
    """A setting or argument is unknown, of the wrong kind, or contradicts another one."""


class NotIncludedError(SharpenError, ImportError):
    """A name of AgentScope's tuner that Sharpen does not have."""


class DatasetError(SharpenError, ValueError):
    """A dataset cannot be read, is empty, or a row lacks what was asked of it."""


class DatasetNotFoundError(DatasetError, FileNotFoundError):
    """A dataset's path does not exist."""


class ModelError(SharpenError, ValueError):
    """A model directory cannot be used: files missing, no chat template, or an architecture we do not serve."""


class SamplingError(SharpenError, ValueError):
    """Sampling parameters that cannot be honoured, or whose tokens the chosen algorithm cannot train on."""


class UnusableAnswerError(SharpenError, ValueError):
    """The model's answer cannot be used: raise it in a workflow, a tool or a judge (`docs/use/failures.md`).

    The rollout then ends as the model's own failure: it gets `rollout.failure_reward`, or takes no part, and is never
    drawn again.
    """


class ContextOverflowError(SharpenError, ValueError):
    """A prompt (or prompt plus requested tokens) does not fit the model's context."""


class EngineError(SharpenError, RuntimeError):
    """The inference engine failed or was closed."""


class EngineLostError(EngineError):
    """An inference engine that will serve nothing any more: its processes died, or it was closed."""


class ParityError(SharpenError, AssertionError):
    """The trainer's logprobs differ from the engine's by more than the tolerance."""


class CertificateError(SharpenError, AssertionError):
    """An invariant of the run certificate is broken: nothing was trained on it."""


class TrainingError(SharpenError, ArithmeticError):
    """An update cannot be made: a gradient is NaN or infinite. No weight was changed."""


class RankError(SharpenError, RuntimeError):
    """A process of a trainer of several was lost, or failed by itself: the run ends, and resumes from its last
    checkpoint."""


class CallError(SharpenError, ValueError):
    """A recorded call cannot be used for training (missing or non-finite logprobs, lengths that differ)."""


class CheckpointError(SharpenError, OSError):
    """A checkpoint could not be written whole, or read back."""


class JournalError(SharpenError, OSError):
    """The journal of a run (`run.db`) could not be written or read: nothing may be trained that is not in it."""


class RolloutError(SharpenError, RuntimeError):
    """Too many rollouts failed for the run to go on."""


class TokenCapError(RolloutError):
    """An auxiliary model has used as many tokens as it may (`max_total_tokens`): the run stops."""


class NoSignalError(SharpenError, RuntimeError):
    """Every reward of the pre-flight check was the same: nothing can be learnt."""
