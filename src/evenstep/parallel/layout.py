"""Parts of a tensor that each rank holds, for norms, checkpoints and emergency saves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, final

import torch
from torch import Tensor, nn

from evenstep.internals import local_tensor
from evenstep.parallel.group import Group
from evenstep.tensors import parameters_in

States = Mapping[str, Mapping[str, Any]]
Norms = Callable[[list[Tensor]], Tensor]  # the norm of each of some tensors, as one tensor
_PIECES = 8  # of rows of a large tensor: 1, 2, 4 or 8 shards hold whole ones
_LEAST = 2**13  # elements of a piece
_ALIGNED = 64  # bytes: kernels may add by alignment


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedTensorRef:
    """Description of a tensor that one rank holds."""

    local: Tensor  # its values on `owner`; elsewhere a tensor without elements, of the same dtype
    shape: tuple[int, ...]
    owner: int


def mapped(tree: Any, act: Callable[[Any], Any], kinds: tuple[type, ...] = (Tensor, ShardedTensorRef)) -> Any:
    """The same dicts, lists and tuples, with `act(leaf)` in the place of each object of `kinds`."""
    if isinstance(tree, kinds):
        return act(tree)
    if isinstance(tree, dict):
        return {key: mapped(value, act, kinds) for key, value in cast("dict[Any, Any]", tree).items()}
    if type(tree) in (list, tuple):
        return type(tree)(mapped(value, act, kinds) for value in tree)
    return tree


class ParameterLayout:
    """Every rank holds every tensor whole."""

    divides: Literal["nothing", "parameters", "elements"] = "nothing"  # between ranks, each of which steps its share
    exact: bool = True  # norms have the bits of one process
    num_shards: int = 1  # parts of the state
    shard_index: int = 0  # number of this rank's part; ranks with equal numbers hold copies of one part

    def __init__(self, group: Group) -> None:
        self.group = group

    def full(self, tensor: Tensor | ShardedTensorRef) -> Tensor:
        """The whole tensor, on the device of `tensor`; all ranks call it together."""
        assert isinstance(tensor, Tensor), "no rank holds a tensor that others lack"
        return tensor

    def all_full(self, tensors: list[Tensor]) -> list[Tensor]:
        """Each gradient whole; all ranks call it together."""
        return tensors

    def like(self, live: Tensor, full: Tensor) -> Tensor:
        """This rank's part of `full`, cut like `live`."""
        return full

    def first_element(self, tensor: Tensor) -> int:
        """The place in the whole tensor, row by row, of the first element that this rank holds of `tensor`."""
        return 0

    def has_pieces(self, tensor: Tensor) -> bool:
        """True if the norm is computed from norms of pieces of rows, so that shards are not gathered."""
        piece = tensor.numel() // _PIECES
        return piece >= _LEAST and tensor.shape[0] % _PIECES == 0 and piece * tensor.itemsize % _ALIGNED == 0

    def piece_norms(self, tensors: list[Tensor], norms: Norms) -> Tensor:
        """Norms of the pieces of each tensor, shape [len(tensors), pieces], alike on all ranks."""
        return norms([piece for one in tensors for piece in one.chunk(_PIECES)]).view(len(tensors), _PIECES)

    def optimizer_state(self, states: States) -> States:
        """The optimizer state of all parameters, from this rank's; what one rank holds is a `ShardedTensorRef`."""
        return states

    def deal(self, optimizer: torch.optim.Optimizer) -> None:
        """Let `optimizer` hold the parameters that this rank steps."""

    def fetch_parameters(self) -> None:
        """Get the parameters that other ranks have stepped; all ranks call it together."""


@final
class Shards(ParameterLayout):
    """Each rank holds a part of every parameter, its gradient and its optimizer state, as torch's `DTensor`s.

    Args:
        num_shards: how many neighbouring ranks share one copy of the parameters; it divides the ranks.
    """

    divides = "elements"

    def __init__(self, group: Group, *, num_shards: int, exact: bool = False) -> None:
        super().__init__(group)
        self.num_shards, self.shard_index = num_shards, group.rank % num_shards
        self.exact = exact
        self._is_copy = group.rank >= num_shards

    def full(self, tensor: Tensor | ShardedTensorRef) -> Tensor:
        shard: Any = tensor
        if getattr(tensor, "device_mesh", None) is None:  # set on a `DTensor`, found without an import
            return shard
        return shard.to(shard.device_mesh.device_type).full_tensor().to(shard.device)

    def all_full(self, tensors: list[Tensor]) -> list[Tensor]:
        small: dict[torch.dtype, list[Tensor]] = {}
        full: list[Tensor] = []
        for one in tensors:
            local = local_tensor(one)
            if local is one or one.numel() >= _PIECES * _LEAST:
                full.append(self.full(one))
                continue
            flat = local.new_zeros(one.numel())
            if not self._is_copy:
                first = self.first_element(one)
                flat[first : first + local.numel()] = local.reshape(-1)
            small.setdefault(one.dtype, []).append(flat)
            full.append(flat)
        for flats in small.values():
            total = torch.cat(flats)
            self.group.sum(total)()
            for flat, sum in zip(flats, total.split([flat.numel() for flat in flats]), strict=True):
                flat.copy_(sum)
        return full

    def like(self, live: Tensor, full: Tensor) -> Tensor:
        mesh: Any = getattr(live, "device_mesh", None)
        if mesh is None or live.shape != full.shape:
            return full
        from torch.distributed.tensor import distribute_tensor

        # Without a source rank each rank cuts its own copy.
        return distribute_tensor(full.to(live.device), mesh, cast("Any", live).placements, src_data_rank=None)

    def first_element(self, tensor: Tensor) -> int:
        if local_tensor(tensor) is tensor:
            return 0
        rows = tensor.shape[0]  # split evenly, as `torch.chunk` does
        return min(self.shard_index * -(-rows // self.num_shards), rows) * (tensor.numel() // rows)

    def has_pieces(self, tensor: Tensor) -> bool:
        return super().has_pieces(tensor) if self.exact else local_tensor(tensor) is not tensor

    def piece_norms(self, tensors: list[Tensor], norms: Norms) -> Tensor:
        if self.exact and _PIECES % self.num_shards:
            return super().piece_norms(self.all_full(tensors), norms)
        count = _PIECES // self.num_shards if self.exact else 1  # on each rank
        own = norms([piece for one in tensors for piece in local_tensor(one).chunk(count)]).view(len(tensors), count)
        each = own.new_zeros(len(tensors), count * self.num_shards)
        if not self._is_copy:
            each[:, self.shard_index * count : (self.shard_index + 1) * count] = own
        self.group.sum(each.view(-1))()
        return each


@final
class Owners(ParameterLayout):
    """Every rank holds every parameter and gradient; the optimizer state of each parameter is one rank's."""

    divides = "parameters"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.num_shards, self.shard_index = group.ranks, group.rank
        self._owned: list[list[nn.Parameter]] = [[] for _ in range(group.ranks)]

    def full(self, tensor: Tensor | ShardedTensorRef) -> Tensor:
        if isinstance(tensor, Tensor):
            return tensor
        is_mine = tensor.owner == self.group.rank
        own = tensor.local if is_mine else torch.empty(tensor.shape, dtype=tensor.local.dtype)
        carried = own.to(self.group.device).contiguous()
        self.group.broadcast([carried], tensor.owner)
        return carried.to(own.device)

    def optimizer_state(self, states: States) -> States:
        mine, rank = dict(states), self.group.rank

        def ref(tensor: Tensor, local: Tensor) -> ShardedTensorRef:
            return ShardedTensorRef(local=local, shape=tuple(tensor.shape), owner=rank)

        everybody = self.group.gather(mapped(mine, lambda one: ref(one, torch.empty(0, dtype=one.dtype))))
        everybody[rank] = mapped(mine, lambda one: ref(one, one))
        return {name: one for theirs in everybody for name, one in theirs.items()}

    def deal(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = parameters_in(optimizer)
        load = [0] * self.group.ranks
        for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):  # the largest first
            owner = load.index(min(load))
            self._owned[owner].append(parameter)
            load[owner] += parameter.numel()
        own = {id(parameter) for parameter in self._owned[self.group.rank]}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]
        for part in getattr(optimizer, "parts", (optimizer,)):  # of a tuple of optimizers
            for parameter in parameters:  # some optimizers make their state when they are built
                if id(parameter) not in own:
                    part.state.pop(parameter, None)

    def fetch_parameters(self) -> None:
        with torch.no_grad():
            for owner, parameters in enumerate(self._owned):
                for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
                    alike = [parameter for parameter in parameters if parameter.dtype == dtype]
                    flat = torch.cat([parameter.detach().reshape(-1) for parameter in alike])
                    self.group.broadcast([flat], owner)
                    pieces = flat.split([parameter.numel() for parameter in alike])
                    for parameter, values in zip(alike, pieces, strict=True) if owner != self.group.rank else ():
                        parameter.copy_(values.view_as(parameter))


def each_norm(layout: ParameterLayout, gradients: list[Tensor], norms: Norms) -> Tensor:
    """‖g‖₂ of each gradient, perhaps in shards; the same on all ranks, which call it together."""
    in_pieces = [layout.has_pieces(gradient) for gradient in gradients]
    if not any(in_pieces):
        return norms(layout.all_full(gradients))
    cut = [gradient for gradient, is_cut in zip(gradients, in_pieces, strict=True) if is_cut]
    whole = [gradient for gradient, is_cut in zip(gradients, in_pieces, strict=True) if not is_cut]
    of_whole = iter(norms(layout.all_full(whole)).unbind() if whole else ())
    of_cut = iter(torch.linalg.vector_norm(layout.piece_norms(cut, norms), dim=1).unbind())
    return torch.stack([next(of_cut if is_cut else of_whole) for is_cut in in_pieces])


def squared_norm(layout: ParameterLayout, gradients: list[Tensor], norms: Norms) -> Tensor:
    """‖g‖₂² over all parameters and their shards, 0-dim; the arguments are those of `each_norm`."""
    each = each_norm(layout, gradients, norms)
    return each.dot(each)
