"""Runs whose ranks are lost and come back between two updates: `strategy=Ordered(Elastic(Lighthouse(rank), …))`."""

from typing import TYPE_CHECKING

from evenstep.lazy import lazy_names

if TYPE_CHECKING:
    from evenstep.contrib.elastic.launch import launch_elastic
    from evenstep.contrib.elastic.lighthouse import Lighthouse
    from evenstep.contrib.elastic.membership import Elastic
    from evenstep.parallel.rank_info import ElasticRank, elastic_rank_of

__all__ = ["Elastic", "ElasticRank", "Lighthouse", "elastic_rank_of", "launch_elastic"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".launch": "launch_elastic",
        ".lighthouse": "Lighthouse",
        ".membership": "Elastic",
        "evenstep.parallel.rank_info": "ElasticRank elastic_rank_of",
    },
)
