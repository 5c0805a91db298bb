"""What may change when a run goes on: a decision for every setting."""

from collections import Counter

from sharpen.config.explain import settings_of
from sharpen.config.resuming import FIXED, MAY_CHANGE, may_change, setting_of
from sharpen.config.run import RunConfig


def test_every_setting_is_in_exactly_one_of_the_two_lists():
    """A new setting needs a decision: may it change on resume (config/resuming.py), and why?"""
    listed = Counter(name for names in (*MAY_CHANGE.values(), *FIXED.values()) for name in names)
    settings = {".".join(place) for place in settings_of(RunConfig)}
    assert settings - listed.keys() == set(), "in neither list"
    assert listed.keys() - settings == set(), "no setting any more"
    assert [name for name, count in listed.items() if count > 1] == []


def test_names_within_a_setting_belong_to_it():
    assert setting_of("workflow_args.size.0") == "workflow_args"
    assert setting_of("auxiliary_models.a.judge.base_url") == "auxiliary_models.*.base_url"
    assert setting_of("workflow_argsx") is None
    assert may_change("auxiliary_models.judge.max_total_tokens")
    assert may_change("algorithm.learning_rate")
    assert not may_change("auxiliary_models.judge.model_path")
    assert not may_change("what model holds")
