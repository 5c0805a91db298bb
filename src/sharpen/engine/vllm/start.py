"""Starts vLLM's processes for `engine.vllm.engine`, with the settings that the engine's guarantees need.

In: a model's folder and the engine's settings. Out: a started `AsyncLLM`, and the model's parameter names and shapes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from sharpen.engine.embedded.kv import default_budget_bytes
from sharpen.engine.families import check_length
from sharpen.engine.vllm.pictures import VLLMPictures
from sharpen.errors import EngineError, ModelError
from sharpen.models.pieces import Piece, pieces_of, text_config
from sharpen.models.table import family_of, refuse_unsupported

MAX_TOP_LOGPROBS = 20
"""The maximum number of alternatives that a request may ask for at each position."""
BACKEND = "sharpen"
"""The name of the transfer backend of `engine.vllm.worker`."""
OWNER_VARIABLE = "SHARPEN_VLLM_OWNER"
"""The environment variable with the id of this process, for vLLM's processes."""
FOLDER_VARIABLE = "VLLM_RPC_BASE_PATH"
"""vLLM's environment variable for the folder of its sockets."""

_BLOCK_TOKENS = 128  # of the KV cache, on a CPU
_STEP_TOKENS = 4096  # of one forward pass, on a CPU
_OF_TOWERS = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
"""Text models whose classes vLLM has in one module with those that see."""
_RETURN_EXPERTS = "enable_return_routed_experts"
_SCHEDULER = "sharpen.engine.vllm.scheduler.ReturningScheduler"
_ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4}
"""At most `max_loras` policy versions have requests in one batch; requests of others wait."""
_SOCKET_NAME, _MAX_SOCKET_PATH = 36, 107  # bytes: vLLM uses a UUID; Linux allows 108 with the final NUL
_ENVIRONMENT = {
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a folder: the hub is not needed
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Environment variables of vLLM's processes, unless already set."""


def read_skeleton(model_path: str, max_model_len: int, *, adapters: bool = False) -> Any:
    """Return the model on the meta device: its configuration, parameter names and shapes. `adapters`: whether LoRA
    adapters are to be served beside it. Raises `ModelError`."""
    from transformers import GenerationConfig

    from sharpen.models.configuration import read_config
    from sharpen.models.modules import has_towers, skeleton

    config = read_config(model_path)
    refuse_unsupported(config, model_path, "vllm")
    if (has_towers(config) or config.model_type in _OF_TOWERS) and find_spec("torchvision") is None:
        raise ModelError(
            f"{model_path} (model type {config.model_type!r}) has towers, or is of a family that has some, and vLLM's "
            "classes for such models import torchvision, which is not installed: install the build that fits torch, or "
            "set engine.type to embedded"
        )
    if config.model_type == "gemma3n" and find_spec("timm") is None:
        raise ModelError(
            f"{model_path} (model type 'gemma3n') has towers, and vLLM's class for them imports timm, also where no "
            "image is shown, which is not installed: install timm, or set engine.type to embedded"
        )
    if adapters and Piece.EXPERTS in pieces_of(config):
        raise ModelError(
            f"{model_path} (model type {config.model_type!r}) is a mixture of experts, and trainer.lora would have "
            "vLLM compute it with adapters beside it: vLLM 0.32 needs Triton for that, and so a GPU, where it is not "
            "tested here; set engine.type to embedded"
        )
    check_length(config, model_path, max_model_len)
    model = skeleton(config)
    with contextlib.suppress(OSError):  # no such file: the end ids are those of the model's configuration
        model.generation_config = GenerationConfig.from_pretrained(model_path)
    model.tie_weights()
    return model


def make_folder(parent: str) -> Path:
    """Make a folder for vLLM's sockets, in `parent`, or in /tmp if the paths would be too long for sockets."""
    name_length = len("/sharpen-vllm-12345678/") + _SOCKET_NAME
    short_enough = len(os.fsencode(parent)) + name_length <= _MAX_SOCKET_PATH
    return Path(tempfile.mkdtemp(prefix="sharpen-vllm-", dir=parent if short_enough else "/tmp"))


def start_llm(
    model_path: str,
    config: Any,
    folder: Path,
    *,
    has_experts: bool,
    pictures: VLLMPictures,
    max_model_len: int,
    dtype: Literal["auto", "float32", "bfloat16"],
    max_slots: int,
    kv_cache_mb: int | None,
    tensor_parallel_size: int,
    replica: tuple[int, int],
    max_lora_rank: int | None,
) -> Any:
    """Start an `AsyncLLM` whose sockets are in `folder`; see `engine.vllm.engine.VLLMEngine.start`."""
    with _environment(folder, _core_binding(*replica, tensor_parallel_size)):
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        chosen = dtype if dtype != "auto" else "float32" if on_cpu else "bfloat16"
        if on_cpu:
            refuse_on_cpu(config, model_path, chosen)
        return _start(
            model_path,
            model=model_path,
            max_model_len=max_model_len,
            dtype=chosen,
            max_num_seqs=max_slots,
            tensor_parallel_size=tensor_parallel_size,
            device_ids=None if on_cpu or replica[1] == 1 else _devices(replica[0], tensor_parallel_size),
            kv_cache_memory_bytes=_kv_bytes(
                config,
                itemsize=getattr(torch, chosen).itemsize,
                num_tokens=max_slots * max_model_len,
                limit_bytes=_limit_bytes(kv_cache_mb, on_cpu),
                num_shares=tensor_parallel_size,
            ),
            **pictures.settings(on_cpu=on_cpu),
            **({} if max_lora_rank is None else {**_ADAPTERS, "max_lora_rank": max_lora_rank}),
            **(_cpu_settings(config, max_model_len, max_slots) if on_cpu else {}),
            **_experts_settings(has_experts, on_cpu),
        )


def refuse_on_cpu(config: Any, model_path: str, dtype: str) -> None:
    """Raise `ModelError` for families that vLLM's build for CPUs cannot serve, and for gated delta nets that would not
    be computed in bfloat16: vLLM's processes would die at the start or of the first request, or be wrong."""
    family = family_of(config)
    if family.not_on_cpu:
        raise ModelError(
            f"{model_path} ({family.name}, model type {config.model_type!r}): vLLM 0.32 does not serve this family on "
            f"a CPU: {family.not_on_cpu}; set engine.type to embedded"
        )
    if dtype != "bfloat16" and hasattr(text_config(config), "linear_num_value_heads"):
        raise ModelError(
            f"{model_path} (model type {config.model_type!r}) has gated delta nets, which vLLM 0.32 computes on a CPU "
            f"only in bfloat16, not in {dtype}: set engine.dtype to bfloat16, or engine.type to embedded"
        )


def _cpu_settings(config: Any, max_model_len: int, max_slots: int) -> dict[str, Any]:
    """Return the settings for a CPU.

    Prompts are not computed in parts: vLLM 0.32 would rewind the random generator of a part, which a seeded generator
    cannot do on a CPU, and die. Prefixes of recurrent layers, which vLLM keeps only where prompts come in parts,
    are therefore not kept. Nothing is compiled: it is unproven that graphs follow newly packed weights.
    """
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        **({"enable_prefix_caching": False} if pieces_of(config) & {Piece.RECURRENT, Piece.CONVOLUTION} else {}),
        "max_num_batched_tokens": max(_STEP_TOKENS, max_model_len, max_slots),
    }


def _experts_settings(has_experts: bool, on_cpu: bool) -> dict[str, Any]:
    """Return the settings with which vLLM returns the experts of every token. Its own needs Triton, and so a GPU."""
    if not has_experts:
        return {}
    return {"scheduler_cls": _SCHEDULER} if on_cpu else {_RETURN_EXPERTS: True}


def _start(model_path: str, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    class ExplicitlyClosed(AsyncLLM):  # type: ignore[misc]
        """Shut down by `VLLMEngine.close` only; vLLM's own finalizer raises when the interpreter ends."""

        def __del__(self) -> None:
            pass

    try:
        return ExplicitlyClosed.from_engine_args(
            AsyncEngineArgs(
                **arguments,
                trust_remote_code=False,
                config_format="hf",  # never Mistral's own, whose weights have other names
                worker_extension_cls="sharpen.engine.vllm.worker.WorkerExtension",
                weight_transfer_config={"backend": BACKEND},
                structured_outputs_config={"backend": "guidance"},  # llguidance, which the trainer's masks are of
                logprobs_mode="processed_logprobs",
                max_logprobs=MAX_TOP_LOGPROBS,
                generation_config="vllm",
                disable_log_stats=True,
                use_tqdm_on_load=False,
                seed=0,
            )
        )
    except ValueError as error:
        raise ModelError(f"vLLM cannot serve {model_path}: {error}") from error
    except RuntimeError as error:
        raise EngineError(not_started(error, returns_experts=_RETURN_EXPERTS in arguments)) from error


def not_started(error: RuntimeError, *, returns_experts: bool) -> str:
    """Return the message of an engine that did not start. vLLM's processes do not say why they died."""
    experts = "recording experts may be the cause: if so, set engine.type to embedded; " if returns_experts else ""
    return f"vLLM did not start: {error} ({experts}VLLM_LOGGING_LEVEL=INFO says more)"


@contextlib.contextmanager
def _environment(folder: Path, extra: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for vLLM's start, and restore the environment afterwards.

    vLLM sets variables of its own, which programs started by a workflow must not inherit. Its temporary files are in
    `folder`, and are deleted with it. Warnings of its import are ignored.
    """
    before = dict(os.environ)
    os.environ.update({name: value for name, value in {**_ENVIRONMENT, **extra}.items() if name not in before})
    os.environ[FOLDER_VARIABLE] = os.environ["TMPDIR"] = str(folder)
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _devices(number: int, tensor_parallel_size: int) -> list[int]:
    """Return the GPUs of a replica, as indices into the visible ones."""
    return list(range(number * tensor_parallel_size, (number + 1) * tensor_parallel_size))


def _core_binding(number: int, count: int, tensor_parallel_size: int) -> dict[str, str]:
    """Return the variable that divides the CPU's cores among all workers (`tensor_parallel_size` for each of `count`
    replicas). Empty, so that vLLM decides, for a single worker or more workers than cores."""
    cores = sorted(os.sched_getaffinity(0))
    num_workers = count * tensor_parallel_size
    if num_workers == 1 or len(cores) < num_workers:
        return {}
    bounds = [worker * len(cores) // num_workers for worker in range(num_workers + 1)]
    shares = [",".join(map(str, cores[start:end])) for start, end in itertools.pairwise(bounds)]
    own = shares[number * tensor_parallel_size : (number + 1) * tensor_parallel_size]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(own)}


def _limit_bytes(kv_cache_mb: int | None, on_cpu: bool) -> int:
    if kv_cache_mb is not None:
        return kv_cache_mb * 2**20
    return default_budget_bytes(torch.device("cpu" if on_cpu else "cuda"))


def _kv_bytes(config: Any, *, itemsize: int, num_tokens: int, limit_bytes: int, num_shares: int) -> int:
    """Return the bytes of one worker's KV cache: keys and values of `num_tokens` in whole blocks, at most the limit."""
    config = text_config(config)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block_bytes = 2 * config.num_hidden_layers * heads * head_dim * itemsize * _BLOCK_TOKENS // num_shares
    num_blocks = -(-num_tokens // _BLOCK_TOKENS) + 1  # vLLM keeps one for itself
    return int(min(num_blocks * block_bytes, limit_bytes))
