"""Shows images to a model: the output of its tower in place of image tokens' embeddings, and the positions that follow.

In: a loaded model with a vision tower, pictures, and the tokens of a pass that stand for them. Out: a `View`, with
which the text decoder computes that pass. What a frozen tower makes of a picture is kept; an engine forgets it when new
weights come. A trained tower computes each picture once in a pass, with gradients where the pass has them.

Shape suffixes: N computed tokens of a pass, I image tokens among them, C hidden size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sharpen.errors import ModelError
from sharpen.models.images import Eyes, eyes_of
from sharpen.models.marks import IndexArray, Shown
from sharpen.models.modules import decoder_of, own_parameters, tower_modules
from sharpen.types import Picture

_CACHED_BYTES = 256 * 2**20
_KEPT_BLOCKS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the tower makes of a picture: one row for each image token, and those that are added behind the first layers
    of the decoder (Qwen3-VL's deep stack)."""

    rows_IC: torch.Tensor
    deeper: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return sum(tensor.numel() * tensor.itemsize for tensor in (self.rows_IC, *self.deeper))


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The images of one pass: which of its rows are image tokens, in ascending order, and what stands there.

    `positions_4N` are each token's place in its sequence and its positions in time, height and width; None for a model
    without such positions.
    """

    at_I: torch.Tensor
    seen: Seen
    positions_4N: torch.Tensor | None


class Sight:
    """How a loaded model sees pictures. Made before the first one is shown."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._model = module.base_model if hasattr(module, "base_model") else module
        self._eyes: Eyes | None = None
        self._seen: OrderedDict[str, Seen] = OrderedDict()
        self._blocks: OrderedDict[str, tuple[IndexArray, int]] = OrderedDict()
        self._merge = getattr(module.config.vision_config, "spatial_merge_size", 1)
        self._decoder = decoder_of(module)
        self._tower = tower_modules(module)
        self._decoder.register_forward_pre_hook(_look, with_kwargs=True)

    @property
    def eyes(self) -> Eyes:
        """The processor of the checkpoint that the model was loaded from. Raises `ModelError` if it has none."""
        if self._eyes is None:
            self._eyes = eyes_of(self._module.name_or_path, self._module.config)
            assert self._eyes is not None, "only models with a vision tower have sight"
        return self._eyes

    @property
    def has_places(self) -> bool:
        """Whether image tokens have positions in height and width, and later tokens other positions than their place
        in the sequence."""
        return hasattr(self._model, "get_vision_position_ids")

    def num_tokens(self, picture: Picture) -> int:
        """Return how many image tokens stand for a picture."""
        return self.eyes.num_tokens(picture)

    @property
    def is_trained(self) -> bool:
        """Whether the tower's weights change."""
        return any(parameter.requires_grad for parameter in own_parameters(self._tower))

    def nothing(self, dtype: torch.dtype) -> torch.Tensor:
        """Return 0, with a gradient of 0 for each trained parameter of the tower: all ranks of a sharded model have to
        have one, also those without images."""
        parts = [parameter.sum() for parameter in own_parameters(self._tower) if parameter.requires_grad]
        return 0.0 * torch.stack(parts).sum().to(dtype)

    def forget(self) -> None:
        """Drop what the tower made of pictures: its weights are others now."""
        self._seen.clear()

    def see(self, picture: Picture) -> Seen:
        """Return what the tower makes of a picture."""
        key = picture.sha256
        if self.is_trained:
            return self._look(picture)
        if key not in self._seen:
            with torch.no_grad():
                self._seen[key] = self._look(picture)
            while len(self._seen) > 1 and sum(seen.num_bytes for seen in self._seen.values()) > _CACHED_BYTES:
                self._seen.popitem(last=False)
        self._seen.move_to_end(key)
        return self._seen[key]

    def _look(self, picture: Picture) -> Seen:
        device = self._decoder.device
        tensors = {name: tensor.to(device) for name, tensor in self.eyes.features(picture).items()}
        output = self._model.get_image_features(**tensors, return_dict=True)
        deeper = getattr(output, "deepstack_features", None) or ()
        return Seen(
            rows_IC=torch.cat(tuple(output.pooler_output)), deeper=tuple(torch.cat(tuple(one)) for one in deeper)
        )

    def positions(self, position_N: IndexArray, shown: Sequence[Shown]) -> IndexArray:
        """Return the positions of tokens in time, height and width, shape (3, N), from their places in the sequence.

        A picture's tokens have the positions of its patches; what follows goes on behind the largest of them.
        """
        places_3N = np.repeat(position_N[None], 3, axis=0)
        for one in sorted(shown, key=lambda one: int(one.rows_N[0])):
            block_3I, extent = self._block(one.picture)
            places_3N[:, one.rows_N] = places_3N[0, one.rows_N[0]] + block_3I[:, : len(one.rows_N)]
            places_3N[:, one.rows_N[-1] + 1 : one.stop] -= block_3I.shape[1] - extent
        return places_3N

    def _block(self, picture: Picture) -> tuple[IndexArray, int]:
        """Return the positions of a picture's patches, shape (3, I), and how many positions it takes."""
        block = self._blocks.get(picture.sha256)
        if block is None:
            (grid,) = self.eyes.features(picture)["image_grid_thw"]
            block_3I = self._model.get_vision_position_ids(0, grid, 1, self._merge).numpy()
            block = self._blocks[picture.sha256] = block_3I, int(grid[1:].max()) // self._merge
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        return block

    def view(self, parts: Sequence[tuple[Picture, IndexArray, IndexArray]], places_4N: IndexArray | None) -> View:
        """Return the view of a pass. `parts` says for some pictures which of their image tokens are computed, and in
        which rows."""
        device = self._decoder.device
        once = {picture: self.see(picture) for picture in dict.fromkeys(picture for picture, _, _ in parts)}
        seen = [(once[picture], torch.from_numpy(which).to(device)) for picture, which, _ in parts]
        at_I = np.concatenate([rows for _, _, rows in parts]) if parts else np.zeros(0, np.int64)
        order = torch.from_numpy(np.argsort(at_I)).to(device)
        depth = len(seen[0][0].deeper) if seen else 0

        def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(tensors)[order]

        empty = torch.zeros(0, self._decoder.config.hidden_size, device=device)
        return View(
            at_I=torch.from_numpy(np.sort(at_I)).to(device),
            seen=Seen(
                rows_IC=joined([one.rows_IC[which] for one, which in seen]) if seen else empty,
                deeper=tuple(joined([one.deeper[layer][which] for one, which in seen]) for layer in range(depth)),
            ),
            positions_4N=None if places_4N is None else torch.from_numpy(places_4N).to(device),
        )

    def view_of(self, position_N: IndexArray, shown: Sequence[Shown]) -> View:
        """Return the view of a pass that computes all tokens of these pictures."""
        for one in shown:
            if len(one.rows_N) != self.num_tokens(one.picture):
                raise ModelError(
                    f"an image has {len(one.rows_N)} tokens, but {self.num_tokens(one.picture)} for "
                    f"{self._module.name_or_path}: the model that is compared must read images as the policy does"
                )
        places_4N = None
        if self.has_places:
            places_4N = np.concatenate([position_N[None], self.positions(position_N, shown)])
        return self.view([(one.picture, np.arange(len(one.rows_N)), one.rows_N) for one in shown], places_4N)


_view: ContextVar[View | None] = ContextVar("sharpen_view", default=None)


@contextmanager
def showing(view: View | None) -> Iterator[None]:
    """Compute the passes inside this block with these images; None: with none."""
    token = _view.set(view)
    try:
        yield
    finally:
        _view.reset(token)


def _look(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Put what the tower saw into the decoder's arguments, before its forward pass."""
    view = _view.get()
    if view is None:
        return None
    ids_1N, embeds_1NC = kwargs.pop("input_ids", None), kwargs.pop("inputs_embeds", None)
    if embeds_1NC is None:
        embeds_1NC = decoder.get_input_embeddings()(ids_1N)
        if getattr(decoder.config, "hidden_size_per_layer_input", 0):  # Gemma 4: those of an image are a padding's
            padded_1N = ids_1N.index_fill(1, view.at_I, decoder.config.pad_token_id)
            kwargs["per_layer_inputs"] = decoder.get_per_layer_inputs(padded_1N)
    kwargs["inputs_embeds"] = embeds_1NC.index_copy(1, view.at_I, view.seen.rows_IC.to(embeds_1NC.dtype)[None])
    if view.positions_4N is not None:
        kwargs["position_ids"] = view.positions_4N[:, None]
    if view.seen.deeper:
        mask_1N = torch.zeros(embeds_1NC.shape[:2], dtype=torch.bool, device=embeds_1NC.device)
        mask_1N[0, view.at_I] = True
        kwargs |= {"visual_pos_masks": mask_1N, "deepstack_visual_embeds": list(view.seen.deeper)}
    return args, kwargs
