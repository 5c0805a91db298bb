"""Which parts of a run's algorithm the user brings, the files that they come from, and what is not recomputed of them.

In: a run's settings. Out: names and digests by setting; a sentence for each part without a second formula.
"""

from __future__ import annotations

from collections.abc import Mapping

from sharpen.config.doors import source_identity
from sharpen.config.problems import refuse
from sharpen.config.run import AGGREGATIONS, KLS, RunConfig
from sharpen.evidence.certificate.brought import KINDS, second_of
from sharpen.evidence.certificate.formulas import FORMULAS
from sharpen.evidence.certificate.plain.loss_rules import LossRules, is_ours
from sharpen.evidence.certificate.rules import PRESETS, Rules
from sharpen.learning.algorithm.supervised import learns_from_rows

Identities = Mapping[str, Mapping[str, int | str]]
_ALGORITHM = "algorithm.algorithm_type"
_UNKNOWN = {
    "advantage": "the advantages",
    "policy_loss": "the losses of tokens, and so the updates and their gradients",
    "kl": "the KL term, and so the updates and their gradients",
    "aggregation": "the weights of tokens",
}
"""What is not known without the second formula of a part."""


def parts_brought(config: RunConfig) -> dict[str, str]:
    """Return the names of the parts that the user brings by their settings (`loss.advantage`), and of the algorithm if
    it is the user's."""
    if learns_from_rows(config.algorithm):
        return {}
    loss, rules = LossRules.of(config), Rules.of(config)
    theirs = {} if config.algorithm.algorithm_type in PRESETS else {_ALGORITHM: config.algorithm.algorithm_type}
    for part, name, ours in (
        ("advantage", rules.advantage, rules.advantage in FORMULAS),
        ("policy_loss", loss.policy_loss, is_ours(loss.policy_loss)),
        ("kl", loss.kl, loss.kl in KLS),
        ("aggregation", rules.aggregation, rules.aggregation in AGGREGATIONS),
    ):
        if not ours:
            theirs[f"loss.{part}"] = name
    return theirs


def without_second(config: RunConfig) -> dict[str, str]:
    """Return for each part that the user brings without a second formula a sentence that says what is not recomputed,
    by part (`advantage`)."""
    sentences = {}
    for setting, name in parts_brought(config).items():
        part = setting.removeprefix("loss.")
        if part in KINDS and second_of(part, name) is None:
            sentences[part] = f"{_UNKNOWN[part]}: {name}, which is {setting}, brings no second formula"
    return sentences


def source_identities(config: RunConfig) -> Identities:
    """Return the size and digest of the file of each part that the user brings, by its setting."""
    kinds = {f"loss.{part}": kind for part, kind in KINDS.items()} | {_ALGORITHM: "algorithms"}
    return {setting: source_identity(kinds[setting], name) for setting, name in parts_brought(config).items()}


def check_sources(config: RunConfig, recorded: Identities) -> None:
    """Raise `ConfigError` if the code of a part is another than the run recorded."""
    names = parts_brought(config)
    refuse(
        f"the code of {names[setting]}, which is {setting}, is not the one that the run trained with (digest "
        f"{recorded[setting]['digest']}, now {now['digest']}): certify with that code"
        for setting, now in source_identities(config).items()
        if setting in recorded and recorded[setting] != now
    )
