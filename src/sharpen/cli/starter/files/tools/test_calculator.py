"""Tests of the tool: `pytest`. What a model sends to it is anything at all."""

import json

from agent import calculator


def test_it_works_out_expressions() -> None:
    assert calculator(json.dumps({"expression": "12 + 30"})) == "42"
    assert calculator(json.dumps({"expression": "3*4"})) == "12"


def test_a_strange_call_is_an_error_that_the_model_reads() -> None:
    for arguments in ("", "[]", "{}", '{"expression": 3}', '{"expression": "import os"}'):
        assert calculator(arguments).startswith("error")
