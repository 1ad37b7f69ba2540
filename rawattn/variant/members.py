"""This module says how blocks that have rows of the same works bring keys: each for itself, or as a cluster for all of them."""

from __future__ import annotations

from typing import ClassVar

from . import Option


class ApartMembers(Option):
    """Blocks that have rows of the same works bring keys each for itself."""

    source: ClassVar[str] = "variant/members/apart.cuh"


class ClusterMembers(Option):
    """They are a cluster, and go along the same tiles."""

    source: ClassVar[str] = "variant/members/cluster.cuh"
