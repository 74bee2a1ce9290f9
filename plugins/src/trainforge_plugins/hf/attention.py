"""Attention kernels and masks, without asking the device anything.

transformers looks at the position ids of every batch to find out whether rows are packed, which makes the host wait
for the device in each step. So models run under attention names of our own (registered through transformers' public
`AttentionInterface` and `AttentionMaskInterface`): the kernels are transformers', the masks are made here from the
batch's document ids. Each architecture still decides which of its layers are causal, windowed or chunked.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainforge.errors import ConfigError
from trainforge.stages import Batch

MaskFunction = Callable[..., Any]
_FLASH_PACKAGES = {
    "flash_attention_2": ("flash_attn", "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": ("flash_attn_interface", "pip install flash-attn-3"),
}
_CAUSAL = "causal_mask_function"


@dataclass(frozen=True)
class Choice:
    """Which kernel runs: the name the recipe uses, the name transformers is given, and why."""

    kernel: str
    registered: str
    reason: str

    @property
    def own_masks(self) -> bool:
        """Whether masks are made here; otherwise transformers makes them from the position ids."""
        return self.registered.startswith("trainforge_")


def choose(wanted: str, model_class: type, config: Any, device: torch.device) -> Choice:
    """Choose the attention kernel for an architecture.

    Raises:
        ConfigError: a kernel that was asked for by name is missing or does not fit the architecture.
    """
    softcap = getattr(config, "attn_logit_softcapping", None)
    fits = bool(getattr(model_class, "_supports_attention_backend", False))
    sdpa = bool(getattr(model_class, "_supports_sdpa", False)) and not softcap
    if wanted == "auto":
        kernel, reason = (
            ("sdpa", "PyTorch's kernels fit this model") if sdpa else ("eager", _why_eager(softcap))
        )
    else:
        kernel, reason = wanted, f"model.attn asks for {wanted}"
        _check(wanted, model_class, softcap, fits, device)
    if not fits:
        return Choice(
            kernel, kernel, reason + "; this architecture makes its own masks from the position ids"
        )
    _register()
    return Choice(kernel, f"trainforge_{_SHORT.get(kernel, kernel)}", reason)


def _why_eager(softcap: Any) -> str:
    if softcap:
        return "sdpa cannot soft-cap attention scores; flex can, on a GPU"
    return "this architecture does not support sdpa"


def _check(wanted: str, model_class: type, softcap: Any, fits: bool, device: torch.device) -> None:
    name = model_class.__name__
    if wanted == "sdpa" and (softcap or not getattr(model_class, "_supports_sdpa", False)):
        raise ConfigError(f"model.attn: {name} cannot use sdpa: {_why_eager(softcap)}; use auto or eager")
    if wanted == "flex" and not (fits and getattr(model_class, "_supports_flex_attn", False)):
        raise ConfigError(f"model.attn: {name} does not support flex attention; use auto")
    if wanted not in _FLASH_PACKAGES:
        return
    if not (fits and getattr(model_class, "_supports_flash_attn", False)):
        raise ConfigError(f"model.attn: {name} does not support flash attention; use auto")
    package, command = _FLASH_PACKAGES[wanted]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"model.attn: {wanted} needs the package {package}; run `{command}`, or use auto")
    if device.type == "cpu":
        raise ConfigError(f"model.attn: {wanted} has no CPU kernel; use auto")


# ------------------------------------------------------------------------------------------ what the masks are made of


class _Current(threading.local):
    batch: Batch | None = None
    starts: Tensor | None = None


_current = _Current()


@contextlib.contextmanager
def masks_of(batch: Batch) -> Iterator[None]:
    """While the model runs in this thread, its masks follow the documents of `batch`."""
    before = _current.batch, _current.starts
    _current.batch, _current.starts = batch, None
    try:
        yield
    finally:
        _current.batch, _current.starts = before


def _boolean_mask(
    batch_size: int, q_length: int, mask_function: MaskFunction, device: torch.device, vmapped: bool
) -> Tensor:
    """True where a token may look: `[rows, 1, tokens, tokens]`, by the layer's rule and within one document."""
    batch = _current.batch
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    heads = torch.zeros(1, dtype=torch.int64, device=device)[:, None, None]
    queries = torch.arange(q_length, device=device)[:, None]
    keys = torch.arange(q_length, device=device)[None, :]
    documents = None if batch is None else batch.document_ids
    if documents is not None and batch is not None and not _plain(mask_function):
        mask_function = _by_position(mask_function, batch.position_ids)
    if vmapped:
        allowed = _vmapped(mask_function, batch_size, q_length, device)
    else:
        allowed = mask_function(rows, heads, queries, keys)
    if documents is not None:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
    return allowed.expand(batch_size, 1, q_length, q_length)


def _plain(mask_function: MaskFunction) -> bool:
    return getattr(mask_function, "__name__", "") == _CAUSAL


def _by_position(mask_function: MaskFunction, positions: Tensor) -> MaskFunction:
    """The rule on positions within the document, so that chunks and windows start anew with each document."""

    def remapped(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Any:
        return mask_function(row, head, positions[row, query], positions[row, key])

    return remapped


def _vmapped(mask_function: MaskFunction, batch_size: int, length: int, device: torch.device) -> Tensor:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    function = mask_function
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=dims, out_dims=0)
    tokens = torch.arange(length, device=device)
    with TransformGetItemToIndex():
        allowed: Tensor = function(
            torch.arange(batch_size, device=device), torch.arange(1, device=device), tokens, tokens
        )
    return allowed


# ----------------------------------------------------------------------------- masks, as transformers asks for them


def _sees_all(q_length: int, mask_function: MaskFunction, local_size: int | None, skip: bool) -> bool:
    """Whether plain causal attention is all that this layer needs in this batch."""
    if not skip or (_current.batch is not None and _current.batch.document_ids is not None):
        return False
    return _plain(mask_function) or (local_size is not None and local_size >= q_length)


def _sdpa_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    device: torch.device,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **unused: Any,
) -> Tensor | None:
    if _sees_all(q_length, mask_function, local_size, allow_is_causal_skip):
        return None
    return _boolean_mask(batch_size, q_length, mask_function, device, use_vmap)


def _eager_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    use_vmap: bool = False,
    **unused: Any,
) -> Tensor:
    allowed = _boolean_mask(batch_size, q_length, mask_function, device, use_vmap)
    zero = torch.zeros((), device=device, dtype=dtype)
    return torch.where(allowed, zero, torch.finfo(dtype).min)


def _flex_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    device: torch.device,
    **unused: Any,
) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    batch = _current.batch
    rule = mask_function
    if batch is not None and batch.document_ids is not None:
        documents = batch.document_ids
        inner = mask_function if _plain(mask_function) else _by_position(mask_function, batch.position_ids)

        def rule(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Any:
            return inner(row, head, query, key) & (documents[row, query] == documents[row, key])

    return create_block_mask(rule, batch_size, None, q_length, kv_length, device=device)


def _flash_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    device: torch.device,
    local_size: int | None = None,
    **unused: Any,
) -> Tensor | None:
    """Where documents begin in the flattened batch (int32, with the end), for kernels of varying lengths."""
    if not _plain(mask_function) and local_size is None:
        raise ConfigError(
            "model.attn: flash attention cannot follow this model's attention pattern; use auto"
        )
    batch = _current.batch
    if batch is None or batch.document_ids is None:
        return None
    if _current.starts is None:
        _current.starts = document_starts(batch.document_ids, batch.documents)
    return _current.starts


def document_starts(documents: Tensor, count: int | None) -> Tensor:
    """Offsets at which documents begin in the flattened rows, and the total: int32 `[count + 1]`.

    Args:
        documents: `[rows, tokens]` document ids.
        count: how many there are; when None the device is asked, which makes the host wait.
    """
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    flat = begins.flatten()
    if count is None:
        offsets = flat.nonzero().flatten()
    else:
        offsets = torch.nonzero_static(flat, size=count).flatten()
    return torch.nn.functional.pad(offsets, (0, 1), value=flat.numel()).to(torch.int32)


# ------------------------------------------------------------------------------------------------------- the kernels


def _sdpa(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *args, **kwargs)


def _flex(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return ALL_ATTENTION_FUNCTIONS["flex_attention"](module, *args, **kwargs)


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The architecture's own eager attention, which its modelling file calls `eager_attention_forward`."""
    for layer in type(module).__mro__:
        function = getattr(sys.modules.get(layer.__module__), "eager_attention_forward", None)
        if function is not None:
            return function(module, *args, **kwargs)
    raise ConfigError(f"model.attn: {type(module).__name__} has no eager attention; use auto")


def _flash(module_name: str) -> Callable[..., Any]:
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        kernels = importlib.import_module(module_name)
        rows, _, tokens, width = query.shape
        wide = (
            torch.nn.functional.pad(value, (0, width - value.shape[-1])) if value.shape[-1] < width else value
        )
        q, k, v = (part.transpose(1, 2) for part in (query, key, wide))
        window = (sliding_window - 1, 0) if sliding_window else (-1, -1)
        options: dict[str, Any] = {"softmax_scale": scaling, "causal": True, "window_size": window}
        if module_name == "flash_attn":
            options["dropout_p"] = dropout
        if softcap:
            options["softcap"] = softcap
        if attention_mask is None:
            out = kernels.flash_attn_func(q, k, v, **options)
        else:
            flat = (part.reshape(rows * tokens, *part.shape[2:]) for part in (q, k, v))
            out = kernels.flash_attn_varlen_func(
                *flat, attention_mask, attention_mask, tokens, tokens, **options
            ).view(rows, tokens, -1, width)
        return out[..., : value.shape[-1]], None

    return attend


_SHORT = {"flash_attention_2": "fa2", "flash_attention_3": "fa3"}
_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "trainforge_sdpa": (_sdpa, _sdpa_mask),
    "trainforge_eager": (_eager, _eager_mask),
    "trainforge_flex": (_flex, _flex_mask),
    "trainforge_fa2": (_flash("flash_attn"), _flash_mask),
    "trainforge_fa3": (_flash("flash_attn_interface"), _flash_mask),
}


def _register() -> None:
    for name, (kernel, mask) in _KERNELS.items():
        AttentionInterface.register(name, kernel)
        AttentionMaskInterface.register(name, mask)
