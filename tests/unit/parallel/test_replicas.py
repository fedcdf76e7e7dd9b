"""Replicas of models that ranks hold."""

from typing import Any

import pytest
from torch import nn

from evenstep.errors import ArgumentError
from evenstep.parallel import Group, replicas


class Two(Group):
    ranks = 2


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_scales_the_rows_of_its_own_samples_is_refused_on_several_ranks(kind: Any) -> None:
    model = nn.Sequential(kind(4, 2, max_norm=0.5))
    replicas.synchronise(model, Group())
    with pytest.raises(ArgumentError):
        replicas.synchronise(model, Two())
