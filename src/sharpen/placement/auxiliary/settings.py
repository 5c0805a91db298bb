"""Checks the settings of auxiliary models before anything is loaded.

In: the settings of the models, the environment. Out: an endpoint's key; `ConfigError` or `ModelError` for settings
that cannot work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from sharpen.config.problems import Problems
from sharpen.config.run import AuxiliaryModelConfig
from sharpen.config.secrets import hide_in_value
from sharpen.errors import ConfigError
from sharpen.models.files import check_model_path, model_folder
from sharpen.placement.engine_choice import check_heads
from sharpen.placement.model_formats import check_formats

NO_KEY = "none"
"""The key for endpoints without one, since the openai package requires a key."""
LOCAL_ONLY = ("tensor_parallel_size", "inference_engine_num", "tool_call_parser", "reasoning_parser")
"""Settings that apply only to a model served here."""


def check_auxiliary_models(models: Mapping[str, AuxiliaryModelConfig]) -> None:
    """Raise `ConfigError` for settings that cannot work, `ModelError` for a model that does not exist, as far as this
    can be checked without the network."""
    problems = Problems()
    for name, model in models.items():
        problems.check(_check_local if model.base_url is None else _check_endpoint, name, model)
    problems.raise_found()


def fetch_auxiliary_models(models: Mapping[str, AuxiliaryModelConfig]) -> None:
    """Download the files of the models that are served here. Raises `ModelError`, and `ConfigError` for attention heads
    that cannot be divided among the devices of an engine."""
    for name, model in models.items():
        if model.base_url is None:
            check_heads(model, model_folder(model.model_path), f"auxiliary_models.{name}")


def endpoint_key(name: str, model: AuxiliaryModelConfig) -> str:
    """Return the key of an endpoint, from the environment. Raises `ConfigError` if it is not set."""
    if model.api_key_env is None:
        return NO_KEY
    key = os.environ.get(model.api_key_env)
    if not key:
        raise ConfigError(
            f"auxiliary_models.{name}.api_key_env names the environment variable {model.api_key_env}, which is not set"
        )
    return key


def _check_endpoint(name: str, model: AuxiliaryModelConfig) -> None:
    where = f"auxiliary_models.{name}"
    url = model.base_url or ""
    parts, shown = urlsplit(url), hide_in_value(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(
            f"{where}.base_url is {shown!r}: it must be an address like https://host/v1 (http or https, "
            "without a query)"
        )
    if parts.path.rstrip("/").endswith(("/completions", "/responses")):
        raise ConfigError(f"{where}.base_url is {shown!r}: leave the method out, as in https://host/v1")
    endpoint_key(name, model)
    for setting in LOCAL_ONLY:
        if setting in model.model_fields_set:
            raise ConfigError(f"{where}.{setting} has no effect at an endpoint (base_url is set): remove it")


def _check_local(name: str, model: AuxiliaryModelConfig) -> None:
    where = f"auxiliary_models.{name}"
    if model.api_key_env is not None:
        raise ConfigError(f"{where}.api_key_env belongs to an endpoint, but there is no base_url")
    check_model_path(model.model_path)
    check_formats(model, where)
