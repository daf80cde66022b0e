"""Experts that sites own (SPES, arXiv:2602.11543): each site trains its own experts, and routes tokens to all of them.

With R sites, expert e of each layer belongs to site e mod R. So every ep rank, and every rank with a shard of whole
experts, has equally many experts of each site; and the owner of an expert does not depend on the mapping.

An owned parameter is a view of the rows of the site's experts, [E/R, ...], with the name and the sharding of the whole
one. The optimizer, the gradient norm and clipping get owned parameters instead of whole ones: the other experts have no
moments and no weight decay, and nothing reads their gradients.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefold.model.local_param import local_tensor


def select_owned(tensor: Tensor, count: int, number: int) -> Tensor:
    """Return a view of the rows of one site's experts.

    Args:
        tensor: rows by expert, [E, ...], plain or a DTensor; each rank has a multiple of `count` of them.
        count: sites of the run.
        number: the site.

    Returns:
        [E/count, ...], sharded as `tensor`; row i is expert number + i * count.
    """
    rows = local_tensor(tensor)
    assert len(rows) % count == 0, (tensor.shape, count)
    owned = rows[number::count]
    if not isinstance(tensor, DTensor):
        return owned
    shape = torch.Size((tensor.shape[0] // count, *tensor.shape[1:]))
    return DTensor.from_local(
        owned, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=tensor.stride()
    )


class OwnedExperts:
    """The trained parameters of a site, of whose experts only its own are trained.

    `parameters` has the trained parameters by name; views of the site's own replace the parameters of experts.

    Args:
        parameters: the trained parameters of this rank, by name.
        experts: names of the parameters of routed experts.
        count: sites of the run.
        number: the site.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], experts: Collection[str], count: int, number: int
    ) -> None:
        self._count = count
        self._number = number
        self._whole = {name: p for name, p in parameters.items() if name in experts}
        owned = {name: nn.Parameter(self._select(p.data)) for name, p in self._whole.items()}
        self.parameters: dict[str, nn.Parameter] = {**parameters, **owned}

    def take_gradients(self) -> None:
        """Give the owned parameters their rows of the gradients, as views; local, without a copy."""
        for name, whole in self._whole.items():
            owned = self.parameters[name]
            assert local_tensor(owned).data_ptr() == local_tensor(whole)[self._number :].data_ptr(), name
            owned.grad = None if whole.grad is None else self._select(whole.grad)

    def drop_gradients(self) -> None:
        """Free the gradients of the experts."""
        for name, whole in self._whole.items():
            whole.grad = self.parameters[name].grad = None

    def _select(self, tensor: Tensor) -> Tensor:
        return select_owned(tensor, self._count, self._number)
