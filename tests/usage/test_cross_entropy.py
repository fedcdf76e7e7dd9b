"""A cross-entropy in chunks where ranks share the head's matrix."""

import torch
from chunked_programs import sharing, trained
from launched import on_ranks

from evenstep.parallel import Single


def test_with_shards_it_is_called_in_the_forward_and_refused_outside_of_it() -> None:
    alone = trained(Single(), inside=True)
    for state, said in on_ranks(2, sharing):
        for name, value in alone.items():
            torch.testing.assert_close(torch.tensor(state[name]), torch.tensor(value), rtol=1e-4, atol=1e-6)
        assert "call `chunked_cross_entropy` in the forward of the module that holds it" in said
