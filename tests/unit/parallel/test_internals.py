"""What is used of FSDP2 beside its public names is still as it was found: fails where a new torch has changed it."""

import inspect

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState


@pytest.mark.parametrize(
    ("owner", "name", "uses"),
    [
        (FSDPModule, "_get_fsdp_state", ()),
        (FSDPState, "_lazy_init", ("all_states",)),
        (FSDPState, "_root_post_backward_final_callback", ("post_backward()", "is_last_backward", "IDLE")),
        (FSDPState, "_register_root_post_backward_final_callback", ("self._root_post_backward_final_callback",)),
        (FSDPState, "_pre_backward", ("self._states_to_backward_prefetch", "self._register_root_post_backward")),
        (FSDPParamGroup, "pre_forward", ("self._register_post_backward_hook(args, kwargs)", "self.unshard(")),
        (FSDPParamGroup, "post_backward", ("self.reduce_grads", "self.reduce_scatter_unused_params", "self.reshard()")),
        (FSDPParamGroup, "unshard", ("self.is_unsharded", "self._all_gather_comm", "_all_gather_process_group")),
        (FSDPParamGroup, "wait_for_unshard", ("self._all_gather_result", "self._to_unsharded()")),
        (FSDPParamGroup, "_to_sharded", ("ShardedState.SHARDED",)),
        (FSDPParamGroup, "_record_post_forward", ("_post_forward_indices", "post_forward_order")),
        (FSDPParam, "to_accumulated_grad_if_needed", ("self.unsharded_accumulated_grad", "self.reduce_dtype")),
        (FSDPParam, "accumulate_unsharded_grad_if_needed", ("self.unsharded_accumulated_grad += ",)),
    ],
)
def test_torch_still_does(owner: type, name: str, uses: tuple[str, ...]) -> None:
    source = inspect.getsource(getattr(owner, name))
    assert [use for use in uses if use not in source] == []
