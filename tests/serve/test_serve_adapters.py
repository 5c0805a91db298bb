"""Adapters beside a served model: peft's own files give peft's own numbers, a request's `model` chooses, and what does
not fit is refused at start with what was wrong.
"""

import asyncio
import json
import shutil
import signal
from pathlib import Path

import anthropic
import httpx
import numpy as np
import openai
import peft
import pytest
import torch
from processes import forked, line_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sharpen.cli.main import BAD_INPUT, main
from sharpen.contracts import GenerateRequest
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.errors import ConfigError, ModelError
from sharpen.models.adapter_files import CONFIG, WEIGHTS, check_fit, read_adapter
from sharpen.models.configuration import read_config
from sharpen.models.modules import skeleton
from sharpen.serve.adapters import adapter_folder, check_adapters, read_adapters
from sharpen.types import Sampling

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning"
)  # peft 0.21 on transformers 5.23
ASK = [{"role": "user", "content": "question"}]


def write(model_dir: Path, folder: Path, seed: int, **options) -> Path:
    """An adapter as peft writes it, far from zero."""
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj", "down_proj"], **options}
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings),
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(toy_model_dir: Path, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "plain": write(toy_model_dir, root / "plain", 1),
        "rooted": write(toy_model_dir, root / "rooted", 2, use_rslora=True, rank_pattern={"down_proj": 2}),
    }


def engine_of(model_dir: Path) -> EmbeddedEngine:
    return EmbeddedEngine.from_pretrained(str(model_dir), max_model_len=64, device="cpu", dtype="float32", max_slots=4)


def ask(adapter: str) -> GenerateRequest:
    prompt = np.arange(5, 25, dtype=np.int32)
    return GenerateRequest(prompt_ids=prompt, sampling=Sampling(max_tokens=9), noise=3, adapter=adapter)


def test_adapters_that_peft_wrote_have_the_numbers_that_peft_computes(toy_model_dir: Path, folders):
    """rsLoRA and ranks of single layers too. Red when the scale has another rank."""
    engine = engine_of(toy_model_dir)
    engine.serve_beside([read_adapter(name, folder) for name, folder in folders.items()])

    async def together():
        return await asyncio.gather(*(engine.generate(ask(name)) for name in folders))

    for generation, folder in zip(asyncio.run(together()), folders.values(), strict=True):
        base = AutoModelForCausalLM.from_pretrained(toy_model_dir, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, folder).eval()
        ids = torch.tensor([*range(5, 25), *generation.ids.tolist()])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, 19:-1].float(), -1)
        expected = logprobs.gather(1, ids[20:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)


def changed(folder: Path, to: Path, config=None, tensors=None) -> Path:
    shutil.copytree(folder, to)
    if config is not None:
        (to / CONFIG).write_text(json.dumps(json.loads((to / CONFIG).read_text()) | config))
    if tensors is not None:
        save_file(tensors(load_file(to / WEIGHTS)), to / WEIGHTS)
    return to


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"use_dora": True}, None, "use_dora True"),
        ({"peft_type": "IA3"}, None, "peft_type 'IA3'"),
        ({"bias": "all"}, None, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, None, r"modules_to_save \['lm_head'\]"),
        ({"r": None}, None, "rank r"),
        (None, lambda all_: {name: one for name, one in all_.items() if "q_proj.lora_A" not in name}, "expected pairs"),
        (None, lambda all_: {name: one * float("nan") for name, one in all_.items()}, "not finite"),
        (None, lambda all_: {}, "no weights"),
        (None, lambda all_: {name.replace("q_proj", "x_proj"): one for name, one in all_.items()}, "x_proj.*no such"),
        (
            None,
            lambda all_: {
                name: torch.cat([one, one], 1).contiguous() if "q_proj.lora_A" in name else one
                for name, one in all_.items()
            },
            "is of another model.*q_proj has",
        ),
        ({"base_model_name_or_path": "some/Other-7B"}, None, "trained on some/Other-7B, but .* is served"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_with_what_is_wrong(
    config, tensors, message, toy_model_dir: Path, folders, tmp_path: Path
):
    folder = changed(folders["plain"], tmp_path / "changed", config, tensors)
    with pytest.raises(ModelError, match=message):
        check_adapters([read_adapter("mine", folder)], toy_model_dir, "toy", "embedded")


def test_the_same_model_at_another_place_or_by_its_name_of_the_hub_fits(toy_model_dir: Path, folders, tmp_path: Path):
    module = skeleton(read_config(toy_model_dir))
    for base, folder in (
        ("org/Toy-1B", "/cache/models--org--Toy-1B/snapshots/0123"),
        ("/elsewhere/Toy-1B", "/models/toy-1b"),
        (None, "/anywhere"),
    ):
        changed_to = tmp_path / f"of-{str(base).replace('/', '-')}"
        adapter = read_adapter("mine", changed(folders["plain"], changed_to, {"base_model_name_or_path": base}))
        check_fit(adapter, module, Path(folder), "given")


def test_names_and_engines_that_cannot_be(toy_model_dir: Path, folders):
    plain = folders["plain"]
    with pytest.raises(ConfigError, match=r"--adapter a=.*given twice"):
        read_adapters([("a", plain), ("a", plain)], "base")
    with pytest.raises(ConfigError, match=r"--adapter base=.*the model's own name"):
        read_adapters([("base", plain)], "base")
    with pytest.raises(ConfigError, match="engine vllm serves no adapters by name"):
        check_adapters(read_adapters([("a", plain)], "base"), toy_model_dir, "base", "vllm")


def test_a_checkpoint_has_its_adapters_in_a_folder(toy_model_dir: Path, folders, tmp_path: Path):
    checkpoint = tmp_path / "global_step_4"
    shutil.copytree(toy_model_dir, checkpoint)
    with pytest.raises(ModelError, match="has no adapters"):
        adapter_folder("my_run", checkpoint)
    shutil.copytree(folders["plain"], checkpoint / "adapter")
    assert adapter_folder("my_run", checkpoint) == checkpoint / "adapter"


@pytest.mark.parametrize(
    ("given", "message"),
    [("plain", "NAME=PATH"), ("=x", "NAME=PATH"), ("a=/nowhere/at-all", "/nowhere/at-all has no adapters")],
)
def test_bad_input_is_one_clear_message(given, message, toy_model_dir: Path, capsys):
    assert main(["serve", str(toy_model_dir), "--adapter", given]) == BAD_INPUT
    assert message in capsys.readouterr().err


def test_adapters_do_not_go_with_a_server_that_learns(tmp_path: Path, capsys):
    assert main(["serve", "--config", str(tmp_path / "x.yaml"), "--adapter", "a=b"]) == BAD_INPUT
    assert "--adapter belongs to" in capsys.readouterr().err


def test_a_requests_model_chooses(toy_model_dir: Path, folders):
    """By both vendors' clients, streaming or not. Red when the sampler leaves the adapter out of the request."""
    given = [f"--adapter={name}={folder}" for name, folder in folders.items()]
    command = ("-m", "sharpen.cli.main", "serve", str(toy_model_dir), "--port", "0", "--name", "base", *given)
    with forked(*command) as process:
        lines = {}
        while "serving" not in lines:
            first, _, rest = line_of(process).partition(" ")
            lines[first] = rest
        assert "plain (rank 4), rooted (rank 4)" in lines["adapters"]
        url, key = lines["serving"].split()[2], lines["key:"]
        client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
        assert [one.id for one in client.models.list()] == ["base", "plain", "rooted"]
        assert client.models.retrieve("rooted").id == "rooted"
        said = {}
        for name in ("base", "plain", "rooted"):
            reply = client.chat.completions.create(model=name, messages=ASK, max_tokens=8, temperature=0, logprobs=True)
            assert reply.model == name
            said[name] = [one.logprob for one in reply.choices[0].logprobs.content]
        assert len({str(one) for one in said.values()}) == 3, "each has other numbers"
        claude = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key)
        with claude.messages.stream(model="plain", max_tokens=4, messages=ASK) as stream:
            assert stream.get_final_message().model == "plain"
        with pytest.raises(openai.NotFoundError, match=r"'none'.*'base', 'plain', 'rooted'"):
            client.chat.completions.create(model="none", messages=ASK)
        with pytest.raises(openai.NotFoundError, match="'base', 'plain', 'rooted'"):
            client.models.retrieve("none")
        assert httpx.get(url.replace("/v1", "/health")).json()["model"] == "base"
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0, process.stderr.read()
