"""What models of `transformers` are called with, and what they give: a mapping of tensors, or a tuple.

Losses that a model adds over a whole batch, such as those that spread tokens over experts, are refused by name: they
are no sum over tokens, so they would depend on how a batch is cut.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from evenstep.errors import ArgumentError, TaskError
from evenstep.pipeline import PipelineModel

_PROMPTS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING")
_ADDED_BY_ADAPTERS = {
    "ADALORA": "what keeps their factors orthogonal (`orth_reg_weight`)",
    "SHADOW": "the loss of the shadow itself (`auxiliary_loss_weight`)",
}
_OF_A_BATCH = ("aux_loss", "router_loss", "z_loss")  # how the names of such losses end


def batch_of(task: object, batch: Any) -> Mapping[str, Any]:
    """A batch as a mapping, such as a dict or a `BatchEncoding`.

    Raises:
        TaskError: it is none.
    """
    if not isinstance(batch, Mapping):
        raise TaskError(f"{type(task).__name__} takes batches that are a dict, but got a {type(batch).__name__}.")
    return cast("Mapping[str, Any]", batch)


def tensor_of(task: object, batch: Mapping[str, Any], name: str, advice: str) -> Tensor:
    """One of the batch's tensors.

    Raises:
        TaskError: the batch has none of this name.
    """
    found: object = batch.get(name)
    if not isinstance(found, Tensor):
        raise TaskError(f"{type(task).__name__} needs a tensor `{name}` in each batch; {advice}")
    return found


def weights_of(task: object, batch: Mapping[str, Any], labels: Tensor) -> Tensor | None:
    """The weights of the batch's labels, if it has some.

    Raises:
        TaskError: they are not of the labels' shape.
    """
    if batch.get("weights") is None:
        return None
    weights = tensor_of(task, batch, "weights", "give one for each label, or none at all.")
    if weights.shape != labels.shape:
        raise TaskError(
            f"`weights` must be of shape {list(labels.shape)}, but are of shape {list(weights.shape)}.", field="weights"
        )
    return weights


def logits_of(task: object, output: Any) -> Tensor:
    """The scores that a model gives, in float32 at least.

    Raises:
        TaskError: it gives none, or a loss of the batch as a whole beside them.
    """
    if isinstance(output, Mapping):
        given = cast("Mapping[str, Any]", output)
        for name in given:
            if name.endswith(_OF_A_BATCH) and given[name] is not None:
                raise TaskError(
                    f"the model gives `{name}`, which depends on how a batch is cut; set "
                    f"`output_router_logits = False` in its config.",
                    field=name,
                )
        output = given.get("logits")
    elif isinstance(output, tuple | list):
        output = cast("Sequence[Any]", output)[0]
    if not isinstance(output, Tensor):
        raise TaskError(f"{type(task).__name__} needs a model that gives `logits`, but got a {type(output).__name__}.")
    return output.float() if output.itemsize < 4 else output


def prompt_tokens(model: nn.Module) -> int:
    adapter: Any = getattr(model, "active_peft_config", None)
    kind = getattr(getattr(adapter, "peft_type", None), "value", None)
    return int(adapter.num_virtual_tokens) if kind in _PROMPTS else 0


def check_whole(task: object, model: nn.Module) -> None:
    """Raise ArgumentError for models that can't be trained by these tasks, whatever the batch."""
    name = type(task).__name__
    if isinstance(model, PipelineModel):
        raise ArgumentError(f'`{name}` does not train models in stages; use `strategy="fsdp"`.', field="model")
    config = getattr(model, "config", None)
    for place, one in (("config", config), ("config.text_config", getattr(config, "text_config", None))):
        if getattr(one, "output_router_logits", False):
            raise ArgumentError(
                f"the loss that `{place}.output_router_logits` adds depends on how a batch is cut; set it to False.",
                field="output_router_logits",
            )
    _check_own_loss(name, model, config)


def _check_own_loss(name: str, model: nn.Module, config: object) -> None:
    adapters: Any = getattr(model, "peft_config", None) or {}
    kinds = [getattr(getattr(one, "peft_type", None), "value", None) for one in adapters.values()]
    if kind := next((one for one in kinds if one in _ADDED_BY_ADAPTERS), None):
        raise ArgumentError(
            f"`{name}` would leave out {_ADDED_BY_ADAPTERS[kind]} of {kind} adapters; use LoRA.", field="model"
        )
    if factor := getattr(config, "z_loss_coefficient", 0.0):
        raise ArgumentError(
            f"`config.z_loss_coefficient` is {factor}, but `{name}` would leave that loss out; set it to 0.",
            field="z_loss_coefficient",
        )
