"""Small real things that tests share: a Hugging Face model directory of a few thousand parameters, a dataset file."""

import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from toy_model import make_toy_model

pytest_plugins = ["failures_at_once"]

# The same examples in every run: what lands is judged by a run that can be repeated. To search for new ones:
# HYPOTHESIS_PROFILE=search make test
# Neither looks at the clock: on a loaded machine drawing examples takes long, which says nothing about the code.
if find_spec("hypothesis") is not None:  # the environments of agent frameworks and of vLLM do without
    from hypothesis import HealthCheck, settings

    UNHURRIED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("fixed", derandomize=True, max_examples=50, **UNHURRIED)
    settings.register_profile("search", max_examples=1000, **UNHURRIED)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# Before torch is loaded, also by processes that tests start: toy products leave nothing to share, and spinning workers
# slow a machine that runs several tests at once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# No certificate is read: the servers of the tests are on this machine and show none. Reading those that it trusts takes
# each client 25 ms.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a shell: tests of Ctrl-C need it
    signal.signal(signal.SIGINT, signal.default_int_handler)


gc.disable()  # while tests are collected: what is loaded stays, and no walk over it finds anything


def pytest_collection_finish() -> None:
    """What is loaded by now, a million objects, stays: no walk of the garbage collector goes over it. Each took 0.5 s,
    several times in a run, and was a quarter of what the tests took."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, *gc.get_threshold()[1:])  # as a run has it


@pytest.fixture(scope="session")
def write_toy_model() -> Callable[..., Path]:
    """`make_toy_model`, for tests that need another model than the shared ones."""
    return make_toy_model


@pytest.fixture(scope="session")
def toy_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy model with a chat template; read only."""
    return make_toy_model(tmp_path_factory.mktemp("toy_model"))


@pytest.fixture(scope="session")
def bare_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy model without a chat template; read only."""
    return make_toy_model(tmp_path_factory.mktemp("bare_model"), template=None)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of an empty database of a server that runs for this session (marker `postgres`)."""
    from postgres_server import running_server

    with running_server() as address:
        yield address


@pytest.fixture(scope="session")
def toy_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.jsonl (40 rows) and test.jsonl (10 rows); read only."""
    folder = tmp_path_factory.mktemp("dataset")
    for split, count in (("train", 40), ("test", 10)):
        rows = [json.dumps({"question": f"question {i}", "answer": str(i)}) for i in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    return folder
