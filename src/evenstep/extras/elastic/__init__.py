"""Runs whose ranks are lost and come back between two updates: `strategy=Ordered(Elastic(Lighthouse(rank), …))`.

A lighthouse tells which processes are there (`lighthouse`), the group of those that are meets anew whenever that has
changed (`membership`), and the run is taken up again from its last committed update (`run`); `launch` starts the
processes of one machine. The core knows only that a group's ranks may change (`Group.can_change`, `Group.run_of`).
"""

from typing import TYPE_CHECKING

from evenstep.lazy import lazy_names

if TYPE_CHECKING:
    from evenstep.extras.elastic.launch import launch_elastic
    from evenstep.extras.elastic.lighthouse import Lighthouse
    from evenstep.extras.elastic.membership import Elastic
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
