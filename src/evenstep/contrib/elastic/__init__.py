"""Runs whose ranks are lost and come back between two updates: `strategy=Ddp(Elastic(Lighthouse(rank), …))`."""

from evenstep.contrib.elastic.membership import Elastic, Lighthouse, lighthouse
from evenstep.parallel.rank_info import elastic_rank_of

__all__ = ["Elastic", "Lighthouse", "elastic_rank_of", "lighthouse"]
