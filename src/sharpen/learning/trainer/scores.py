"""Scores a pack's loss entries from hidden states, a chunk of rows at a time.

In: hidden states at a pack's rows, output embeddings. Out: logprob, entropy and other moments of each entry, and its
divergence from another model or a statistic of its distribution. Logits are the largest tensors of training, so their
number is limited: beyond the limit they are computed in chunks, and again in the backward pass. The gradient of a chunk
of a model alone is written out (`_Chunks`): it needs one matrix of the chunk's size, where autograd keeps four, and the
gradient of the output layer, as large as the layer, is there once and each chunk is added to it. With a frozen output
layer it is prepared while the logits are there (`_FrozenChunk`), and they are computed once.

Shape suffixes: E loss entries, R rows (distinct hidden state, temperature and mask), V vocabulary, C hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from sharpen.engine.token_masks import forbid
from sharpen.learning.trainer.constrained import FORBIDDEN, UNCONSTRAINED, RowMasks
from sharpen.learning.trainer.output import OutputLayer
from sharpen.learning.trainer.packing import IndexArray, Pack
from sharpen.learning.trainer.tables import gradient_of, is_added_in_place
from sharpen.types import FloatArray

_BLOCK = 64
"""How many ids are summed at once for a cumulative probability."""
MAX_LOGITS = 1 << 24
"""Number of logits (rows x vocabulary) held at a time on a CPU; see `max_logits_on`. With a vocabulary of 152,000 these
are 110 rows: products of more are hardly faster."""


RowStatistic = Callable[[torch.Tensor], torch.Tensor]
"""Computes one number per distribution, shape R, from logprobs of shape (R, V)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackScores:
    """A model's scores of a pack's loss entries (shape E, in nats). `varentropy_E` is the variance of -logprob in each
    entry's distribution (nats squared), `cumulative_E` the probability of smaller ids than its own and half that one's;
    neither has a gradient. `divergence_E` is the divergence from another
    model, `statistic_E` a statistic of each entry's distribution; each is None unless requested."""

    logprobs_E: torch.Tensor
    entropy_E: torch.Tensor
    varentropy_E: torch.Tensor
    cumulative_E: torch.Tensor
    divergence_E: torch.Tensor | None = None
    statistic_E: torch.Tensor | None = None

    def first(self, count: int) -> PackScores:
        """Return the scores of the first so many entries."""
        divergence_E, statistic_E = self.divergence_E, self.statistic_E
        return PackScores(
            logprobs_E=self.logprobs_E[:count],
            entropy_E=self.entropy_E[:count],
            varentropy_E=self.varentropy_E[:count],
            cumulative_E=self.cumulative_E[:count],
            divergence_E=None if divergence_E is None else divergence_E[:count],
            statistic_E=None if statistic_E is None else statistic_E[:count],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherModel:
    """Another model to compare with at a pack's rows, over the vocabulary that both share: its hidden states, its
    output embeddings, and the divergence (R) of two sets of logprobs (R, V), the scored model's first."""

    hidden_RC: torch.Tensor
    head: OutputLayer
    divergence: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def rows(self, start: int, stop: int) -> OtherModel:
        """Return the same for rows `start:stop`."""
        return replace(self, hidden_RC=self.hidden_RC[start:stop])


def max_logits_on(device: torch.device) -> int:
    """Return how many logits to hold at a time. On a GPU they take about a twelfth of its memory, at 20 bytes each:
    every chunk adds to the gradient of the output embeddings, so fewer, larger chunks save memory traffic."""
    if device.type != "cuda":
        return MAX_LOGITS
    return max(MAX_LOGITS, int(torch.cuda.get_device_properties(device).total_memory) // 256)


def score_rows(
    head: OutputLayer,
    hidden_RC: torch.Tensor,
    temperatures_R: torch.Tensor | None,
    row_E: IndexArray,
    targets_E: IndexArray,
    entropy_gradient: bool,
    compared: OtherModel | None,
    statistic: RowStatistic | None,
    max_logits: int,
    masks: RowMasks | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return logprob, entropy, varentropy, cumulative probability, and divergence or statistic of each entry, all among
    the tokens that `masks` allow. Entries are sorted by row, so that a chunk of rows (at most `max_logits` logits)
    covers a range of entries; results are in the original order."""
    device = hidden_RC.device
    order_E = np.argsort(row_E, kind="stable")
    sorted_row_E = row_E[order_E]
    vocabulary = head.num_ids + (0 if compared is None else compared.head.num_ids)
    chunk = max(1, max_logits // vocabulary)
    starts = range(0, len(hidden_RC), chunk)
    firsts = np.searchsorted(sorted_row_E, [*starts, len(hidden_RC)]).tolist()
    spans = [
        _Span(start, min(start + chunk, len(hidden_RC)), first, last)
        for start, (first, last) in zip(starts, itertools.pairwise(firsts), strict=True)
    ]
    inputs = (hidden_RC, temperatures_R, to_device(sorted_row_E, device), to_device(targets_E[order_E], device))
    again = len(spans) > 1 and torch.is_grad_enabled()
    alone = compared is None and statistic is None
    is_frozen = head.is_frozen and not entropy_gradient
    found: tuple[torch.Tensor, ...]
    if again and alone and not is_frozen:
        found = _Chunks.apply(head, entropy_gradient, masks, spans, *inputs, *_trained(head))  # type: ignore[no-untyped-call]
    else:
        parts: list[tuple[torch.Tensor, ...]] = []
        for span in spans:
            mine, allowed = span.of(*inputs), None if masks is None else masks.chunk(span.start, span.stop)
            if again and alone:
                parts.append(_FrozenChunk.apply(head, allowed, *mine))  # type: ignore[no-untyped-call]
                continue
            other = None if compared is None else compared.rows(span.start, span.stop)
            options = (entropy_gradient, other, statistic, allowed)
            if again:
                parts.append(checkpoint(_score_chunk, head, *mine, *options, use_reentrant=False))
            else:
                parts.append(_score_chunk(head, *mine, *options))
        found = tuple(torch.cat(chunks) for chunks in zip(*parts, strict=True))
    back_E = to_device(np.argsort(order_E), device)
    return tuple(one[back_E] for one in found)


class _Span(NamedTuple):
    """A chunk: rows `start:stop`, and their entries `first:last`."""

    start: int
    stop: int
    first: int
    last: int

    def of(
        self,
        hidden_RC: torch.Tensor,
        temperatures_R: torch.Tensor | None,
        row_E: torch.Tensor,
        targets_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Return the same of the chunk alone, whose rows count from 0."""
        rows, entries = slice(self.start, self.stop), slice(self.first, self.last)
        temperatures_R = None if temperatures_R is None else temperatures_R[rows]
        return hidden_RC[rows], temperatures_R, row_E[entries] - self.start, targets_E[entries]


def _score_chunk(
    head: OutputLayer,
    hidden_RC: torch.Tensor,
    temperatures_R: torch.Tensor | None,
    row_E: torch.Tensor,
    targets_E: torch.Tensor,
    entropy_gradient: bool,
    compared: OtherModel | None,
    statistic: RowStatistic | None,
    masks: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, ...]:
    """Return logprob, entropy, varentropy and cumulative probability of each entry, and its statistic or its divergence
    from `compared`, if given. `masks` are those of `RowMasks.chunk`."""
    logits_RV = head.logits(hidden_RC)
    scaled_RV = _tempered(logits_RV, temperatures_R, masks)
    logprobs_RV = scaled_RV.log_softmax(dim=-1)
    entropy_R, varentropy_R, below_E = _moments(logprobs_RV.detach(), row_E, targets_E)
    if entropy_gradient and torch.is_grad_enabled():
        entropy_R = -(logprobs_RV.exp() * logprobs_RV).sum(dim=-1)
    found = logprobs_RV[row_E, targets_E], entropy_R[row_E], varentropy_R[row_E], below_E
    if statistic is not None:
        assert compared is None
        return *found, statistic(logprobs_RV)[row_E]
    if compared is None:
        return found
    with torch.no_grad():
        other_RV = _tempered(compared.head.logits(compared.hidden_RC), temperatures_R, masks).to(scaled_RV.dtype)
    common = min(scaled_RV.shape[1], other_RV.shape[1])  # rows beyond the shorter one are padding
    mine_RV = logprobs_RV if scaled_RV.shape[1] == common else scaled_RV[:, :common].log_softmax(dim=-1)
    divergence_R = compared.divergence(mine_RV, other_RV[:, :common].log_softmax(dim=-1))
    return *found, divergence_R[row_E]


def _tempered(
    logits_RV: torch.Tensor, temperatures_R: torch.Tensor | None, masks: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    """Return logits in fp32 or better, divided by the rows' temperatures, with those of tokens that are not allowed
    very low."""
    logits_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    if temperatures_R is not None:
        logits_RV = logits_RV / temperatures_R.to(logits_RV.dtype)[:, None]
    return logits_RV if masks is None else forbid(logits_RV, *masks, FORBIDDEN)


def _autocast_type(kind: str) -> torch.dtype | None:
    """Return the type in which products are computed now on this kind of device; None: in that of their inputs."""
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


def _trained(head: OutputLayer) -> list[torch.nn.Parameter]:
    return [one for one in head.embeddings.parameters() if one.requires_grad]


class _Chunks(torch.autograd.Function):
    """`_score_chunk` of a model alone, for all chunks. Nothing of the size of their logits is kept until the backward
    pass, which computes them again."""

    @staticmethod
    def forward(
        ctx: Any,
        head: OutputLayer,
        entropy_gradient: bool,
        masks: RowMasks | None,
        spans: Sequence[_Span],
        hidden_RC: torch.Tensor,
        temperatures_R: torch.Tensor | None,
        row_E: torch.Tensor,
        targets_E: torch.Tensor,
        *trained: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """`trained` are the parameters of the output layer that get gradients."""
        ctx.head, ctx.entropy_gradient, ctx.spans = head, entropy_gradient, spans
        ctx.masks = [None if masks is None else masks.chunk(span.start, span.stop) for span in spans]
        inputs = (hidden_RC, temperatures_R, row_E, targets_E)
        parts = [
            _score_chunk(head, *span.of(*inputs), False, None, None, allowed)
            for span, allowed in zip(spans, ctx.masks, strict=True)
        ]
        found = tuple(torch.cat(chunks) for chunks in zip(*parts, strict=True))
        ctx.save_for_backward(*inputs, found[1])
        ctx.autocast = _autocast_type(hidden_RC.device.type)
        ctx.mark_non_differentiable(*found[2:], *([] if entropy_gradient else [found[1]]))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_E: torch.Tensor, entropy_grad_E: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        """Add up the gradients of the output layer, chunk by chunk."""
        *inputs, entropy_E = ctx.saved_tensors
        layer = (_Product if _Product.is_that_of(ctx.head) else _AnyLayer)(ctx.head, ctx.autocast)
        parts = []
        for span, allowed in zip(ctx.spans, ctx.masks, strict=True):
            hidden_RC, temperatures_R, row_E, targets_E = span.of(*inputs)
            entries = slice(span.first, span.last)
            entropies = (entropy_E[entries], entropy_grad_E[entries]) if ctx.entropy_gradient else None
            logits_RV = layer.logits(hidden_RC)
            grad_RV = _gradient_of_logits(
                logits_RV.detach(), temperatures_R, allowed, row_E, targets_E, grad_E[entries], entropies
            )
            parts.append(layer.add(hidden_RC, logits_RV, grad_RV))
            del logits_RV, grad_RV
        return None, None, None, None, torch.cat(parts), None, None, None, *layer.gradients


def _gradient_of_logits(
    logits_RV: torch.Tensor,
    temperatures_R: torch.Tensor | None,
    masks: tuple[torch.Tensor, torch.Tensor] | None,
    row_E: torch.Tensor,
    targets_E: torch.Tensor,
    grad_E: torch.Tensor,
    entropies: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Return the gradient of a chunk's logits. `entropies` are those of its entries and their gradients.

    With probabilities p of a row, at temperature T, and the gradients g_E of its entries' logprobs and h of its
    entropies' sum: it is (g of its targets - p (sum of g + h (log p + entropy))) / T.
    """
    logprobs_RV = _tempered(logits_RV, temperatures_R, masks).log_softmax(dim=-1)
    sum_R = logprobs_RV.new_zeros(len(logprobs_RV)).index_add_(0, row_E, grad_E)
    if entropies is not None:
        entropy_E, entropy_grad_E = entropies
        entropy_R = sum_R.new_empty(len(sum_R)).index_copy_(0, row_E, entropy_E)
        by_row_R = torch.zeros_like(sum_R).index_add_(0, row_E, entropy_grad_E)
        factor_RV = (logprobs_RV + entropy_R[:, None]).mul_(by_row_R[:, None]).add_(sum_R[:, None])
        grad_RV = logprobs_RV.exp_().mul_(factor_RV).neg_()
    else:
        grad_RV = logprobs_RV.exp_().mul_(-sum_R[:, None])
    vocabulary = grad_RV.shape[1]
    grad_RV.view(-1).index_add_(0, row_E * vocabulary + targets_E, grad_E)
    if temperatures_R is not None:
        grad_RV /= temperatures_R.to(grad_RV.dtype)[:, None]
    return grad_RV


class _AnyLayer:
    """The gradients of an output layer of any kind, by autograd."""

    def __init__(self, head: OutputLayer, autocast: torch.dtype | None) -> None:
        self._head, self._autocast = head, autocast
        self._trained = _trained(head)  # anew: those of a sharded model are gathered again by now
        self._sums: list[torch.Tensor] = []
        self._hidden_RC = torch.empty(0)

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """Those of its parameters, over all that was added."""
        return [*self._sums]

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next chunk."""
        kind = hidden_RC.device.type
        with torch.enable_grad(), nullcontext() if self._autocast is None else torch.autocast(kind, self._autocast):
            self._hidden_RC = hidden_RC.detach().requires_grad_()
            return self._head.logits(self._hidden_RC)

    def add(self, hidden_RC: torch.Tensor, logits_RV: torch.Tensor, grad_RV: torch.Tensor) -> torch.Tensor:
        """Add a chunk's gradients of its parameters; return that of its hidden states."""
        grads = torch.autograd.grad(logits_RV, (self._hidden_RC, *self._trained), grad_RV.to(logits_RV.dtype))
        self._sums = [*grads[1:]] if not self._sums else [a.add_(b) for a, b in zip(self._sums, grads[1:], strict=True)]
        own_RC: torch.Tensor = grads[0]
        return own_RC


class _Product:
    """The same of a plain product on a processor. Its gradient is a matrix as large as the layer, for each chunk of few
    rows: it is added to the one that is there, to that of earlier micro-batches too, which is never made anew; that of
    a large table is in its place from the first (`trainer.tables`)."""

    def __init__(self, head: OutputLayer, autocast: torch.dtype | None) -> None:
        self._factor = head.factor
        self._weight_VC: torch.nn.Parameter = head.embeddings.weight
        self._rounded_VC = self._weight_VC.detach().to(autocast or self._weight_VC.dtype)
        earlier = gradient_of(self._weight_VC) if is_added_in_place(self._weight_VC) else self._weight_VC.grad
        self._is_new = earlier is None
        self._sum_VC = torch.zeros_like(self._weight_VC) if earlier is None else earlier

    @staticmethod
    def is_that_of(head: OutputLayer) -> bool:
        """Whether it is one, and trains."""
        layer = head.embeddings
        if type(layer) is not torch.nn.Linear or layer.bias is not None or head.softcap is not None:
            return False
        weight, types = layer.weight, (torch.float32, torch.float64)
        return type(weight.data) is torch.Tensor and weight.is_cpu and weight.requires_grad and weight.dtype in types

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """See `_AnyLayer`; None if it is in its place already."""
        return [self._sum_VC if self._is_new else None]

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """See `_AnyLayer`."""
        logits_RV = torch.nn.functional.linear(hidden_RC.to(self._rounded_VC.dtype), self._rounded_VC)
        return logits_RV if self._factor == 1 else logits_RV * self._factor

    def add(self, hidden_RC: torch.Tensor, logits_RV: torch.Tensor, grad_RV: torch.Tensor) -> torch.Tensor:
        """See `_AnyLayer`. The sum is in the type of the weights, and so is what is added."""
        if self._factor != 1:
            grad_RV *= self._factor
        self._sum_VC.addmm_(grad_RV.t().to(self._sum_VC.dtype), hidden_RC.to(self._sum_VC.dtype))
        own_RC: torch.Tensor = grad_RV.to(self._rounded_VC.dtype) @ self._rounded_VC
        return own_RC.to(hidden_RC.dtype)


class _FrozenChunk(torch.autograd.Function):
    """`_score_chunk` of a model alone, whose output layer gets no gradient. Only matrices as small as its hidden states
    are kept until the backward pass.

    With probabilities p of a row, at temperature T, and w the gradients of its logits: the gradient of log p of its
    entry e is (w_e - sum of p w) / T. The sum of all ids but the row's targets is rounded as a product is; what the
    targets have of it is taken from w_e in fp32, since 1 - p of a sure token would be lost in that rounding.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: OutputLayer,
        masks: tuple[torch.Tensor, torch.Tensor] | None,
        hidden_RC: torch.Tensor,
        temperatures_R: torch.Tensor | None,
        row_E: torch.Tensor,
        targets_E: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            own_RC = hidden_RC.detach().requires_grad_()
            logits_RV = head.logits(own_RC)
        logprobs_RV = _tempered(logits_RV.detach(), temperatures_R, masks).log_softmax(dim=-1)
        entropy_R, varentropy_R, below_E = _moments(logprobs_RV, row_E, targets_E)
        at_E = row_E * head.num_ids + targets_E
        logprobs_E = logprobs_RV.view(-1)[at_E]
        others = logprobs_RV.exp_().view(-1)
        number_E = others.index_fill_(0, at_E, 0.0).index_add_(0, at_E, torch.ones_like(logprobs_E))[at_E]
        others_RV = others.index_fill_(0, at_E, 0.0).view_as(logprobs_RV).to(logits_RV.dtype)
        (others_RC,) = torch.autograd.grad(logits_RV, own_RC, others_RV)
        own_EC = head.embeddings.weight.detach()[targets_E] * head.factor
        share_E = logprobs_E.exp() / number_E  # entries of a row may have the same target
        ctx.save_for_backward(others_RC.to(logits_RV.dtype), own_EC, share_E, temperatures_R, row_E)
        ctx.dtype = hidden_RC.dtype
        found = logprobs_E, entropy_R[row_E], varentropy_R[row_E], below_E
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_E: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        """See the formula of the class."""
        others_RC, own_EC, share_E, temperatures_R, row_E = ctx.saved_tensors
        sum_R = grad_E.new_zeros(len(others_RC)).index_add_(0, row_E, grad_E)
        factor_E = grad_E - sum_R[row_E] * share_E
        grad_RC = (others_RC * -sum_R[:, None]).index_add_(0, row_E, own_EC * factor_E[:, None])
        if temperatures_R is not None:
            grad_RC /= temperatures_R.to(grad_RC.dtype)[:, None]
        return None, None, grad_RC.to(ctx.dtype), None, None, None


def _moments(
    logprobs_RV: torch.Tensor, row_E: torch.Tensor, targets_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean and variance of -logprob in each row's distribution, and the probability of smaller ids than each
    entry's, with half its own."""
    probs_RV = logprobs_RV.exp()
    product_RV = probs_RV * logprobs_RV
    entropy_R = -product_RV.sum(dim=-1)
    square_R = product_RV.mul_(logprobs_RV).sum(dim=-1)
    return entropy_R, (square_R - entropy_R.square()).clamp_(min=0.0), _cumulative(probs_RV, row_E, targets_E)


def _cumulative(probs_RV: torch.Tensor, row_E: torch.Tensor, targets_E: torch.Tensor) -> torch.Tensor:
    """Return the probability of smaller ids than each entry's, with half its own: of whole blocks of ids, and of those
    in its own block (B)."""
    num_rows, vocab_size = probs_RV.shape
    num_blocks = vocab_size // _BLOCK
    blocks_R = probs_RV[:, : num_blocks * _BLOCK].reshape(num_rows, num_blocks, _BLOCK).sum(dim=-1)
    before_R = torch.nn.functional.pad(blocks_R.cumsum(dim=-1), (1, 0))
    first_E = targets_E - targets_E % _BLOCK
    ids_EB = first_E[:, None] + torch.arange(_BLOCK, device=probs_RV.device)
    own_EB = probs_RV[row_E[:, None], ids_EB.clamp(max=vocab_size - 1)]
    weights_EB = (ids_EB < targets_E[:, None]).to(own_EB.dtype) + (ids_EB == targets_E[:, None]).to(own_EB.dtype) / 2.0
    return before_R[row_E, first_E // _BLOCK] + (own_EB * weights_EB).sum(dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The distinct (hidden state, temperature, mask) of a pack's entries, the mask's number or `UNCONSTRAINED`; and the
    number of its row for each entry."""

    predict_R: IndexArray
    temperatures_R: FloatArray
    mask_R: IndexArray
    row_E: IndexArray


def rows_of(pack: Pack) -> Rows:
    """Return the rows of a pack. Those of a pack with another one for its teacher are its entries: what is one row here
    may be several there."""
    if pack.told is not None:
        masks = None if pack.constrained is None else pack.constrained.mask_E(len(pack.predict_E))
        return Rows(
            predict_R=pack.predict_E,
            temperatures_R=pack.temperatures_E,
            mask_R=np.full(len(pack.predict_E), UNCONSTRAINED) if masks is None else masks,
            row_E=np.arange(len(pack.predict_E)),
        )
    temperatures, temperature_E = np.unique(pack.temperatures_E, return_inverse=True)
    key_E, num_masks = pack.predict_E * len(temperatures) + temperature_E, 0
    if pack.constrained is not None:
        num_masks = len(pack.constrained.masks_MW)
        key_E = key_E * (num_masks + 1) + pack.constrained.mask_E(len(pack.predict_E)) - UNCONSTRAINED
    key_R, row_E = np.unique(key_E, return_inverse=True)
    key_R, mask_R = np.divmod(key_R, num_masks + 1)
    return Rows(
        predict_R=key_R // len(temperatures),
        temperatures_R=temperatures[key_R % len(temperatures)],
        mask_R=mask_R + UNCONSTRAINED,
        row_E=row_E,
    )


def row_masks(pack: Pack, rows: Rows, device: torch.device) -> RowMasks | None:
    """Return the masks of a pack's rows on a device; None if no entry has one."""
    if pack.constrained is None:
        return None
    return RowMasks(mask_R=rows.mask_R, masks_MW=to_device(pack.constrained.masks_MW, device))


def to_device(values: np.ndarray[Any, Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy an array or CPU tensor to a device; to a GPU from pinned memory, since other copies wait for the GPU."""
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
