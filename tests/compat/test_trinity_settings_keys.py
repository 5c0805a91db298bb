"""No key of a Trinity-RFT file is silently ignored, and no value of one is a bug of ours."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpen.compat.trinity.yaml.conversion import convert
from sharpen.compat.trinity.yaml.table import RULES
from sharpen.config.load import ConfigFile
from sharpen.errors import ConfigError

ENVIRONMENT = dict.fromkeys(("OPENAI_BASE_URL", "text", "7", "false"), "http://endpoint.invalid/v1")
VALUES = [True, False, 0, 1, 7, 0.5, "text", "7", "false", "", [], ["a"], [1, 2], {}, {"a": 1}, {"a": {"b": [1]}}]


def file_with(pairs: dict[str, Any]) -> dict[str, Any]:
    """The nested content of a file that has these keys (`[]` stands for the first item of a list)."""
    content: dict[str, Any] = {}
    for key, value in pairs.items():
        section: Any = content
        *path, name = key.split(".")
        for part in path:
            if part.endswith("[]"):
                items = section.setdefault(part[:-2], [{}])
                section = items[0]
            else:
                section = section.setdefault(part, {})
        section[name] = value
    return content


def converted(content: dict[str, Any]) -> ConfigFile | str:
    """The settings, or what the error says."""
    try:
        return convert(content, "f.yaml", environment=ENVIRONMENT)
    except ConfigError as error:
        return str(error)


PARTNERS = {
    "explorer.auxiliary_models[]": {"explorer.auxiliary_models[].model_path": "helper"},
    "buffer.explorer_input.eval_tasksets[]": {"buffer.explorer_input.eval_tasksets[].path": "held_out.jsonl"},
}
"""What a section cannot do without."""


@pytest.mark.parametrize("key", RULES)
def test_each_key_alone_is_applied_said_named_or_refused(key):
    """Some value of every key shows: in a setting, in a notice, or in an error that names the key. (`convert` itself
    asserts, for every file, that each key was answered for.)
    """
    partners = next((needed for section, needed in PARTNERS.items() if key.startswith(section)), {})
    without = convert(file_with(partners), "f.yaml", environment=ENVIRONMENT)
    written = key.replace("[]", "[0]")
    shows = False
    for value in VALUES:
        found = converted(file_with({**partners, key: value}))
        if isinstance(found, str):
            assert f"'{written}" in found
            shows = True
        else:
            shows |= (found.settings, found.notices) != (without.settings, without.notices)
    assert shows


@settings(max_examples=300, deadline=None)
@given(pairs=st.dictionaries(st.sampled_from(sorted(RULES)), st.sampled_from(VALUES), max_size=12))
def test_any_keys_and_values_convert_or_are_refused_with_a_reason(pairs):
    try:
        content = file_with(pairs)
    except (AttributeError, TypeError):  # one key is a section of another in this mixture
        return
    found = converted(content)
    assert not isinstance(found, str) or "f.yaml" in found
