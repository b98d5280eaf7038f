"""What `probe` and `profile` share: where the document goes, and the ranks that make it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slipstream.cli.output import print_document, reserved_stdout
from slipstream.cli.ranks import as_rank, on_own_ranks

if TYPE_CHECKING:
    from slipstream.documents import Document
    from slipstream.train.recipe import Recipe

    AnyDocument = TypeVar("AnyDocument", bound=Document)


def measure(
    kind: type[AnyDocument],
    task: str,
    recipe: Recipe,
    wanted: Mapping[str, Any],
    *,
    nodes: int | None,
    per_node: int | None,
    output: Path,
    overwrite: bool,
    as_json: bool,
) -> AnyDocument | None:
    """Measures on ranks and saves the document; on rank 0 of a job, or without one, returns it.

    Other ranks get None. With as_json the document is printed as well. Raises SlipstreamError,
    before anything is measured, where `output` cannot be written; see `check_output`.
    """
    from slipstream.outputs import check_output, write_output
    from slipstream.train.launch.joined import find_job
    from slipstream.train.launch.measure import Measurement, measure_here, measure_in_job

    ranks = {"cluster.nodes": nodes, "cluster.ranks_per_node": per_node}
    job = find_job(os.environ)
    if job is None:
        recipe = recipe.replace({key: count for key, count in ranks.items() if count is not None})

    def check() -> None:
        check_output(output, "--output", overwrite=overwrite)

    measurement = Measurement(task, recipe, wanted, check)
    with reserved_stdout() as stdout:
        if job is None:
            text = on_own_ranks(lambda: measure_here(measurement))
        else:
            text = as_rank(
                lambda: measure_in_job(measurement, job, nodes=nodes, per_node=per_node), job.rank
            )
            if job.rank != 0:
                return None
        document = kind.from_json(text, "what was measured")
        write_output(output, document.to_json().encode(), "--output", overwrite=overwrite)
        if as_json:
            print_document(document.model_dump(mode="json"), stdout)
    return document


def leave_job() -> None:
    """Ends this process at once if it is one of several ranks of a job that has done its work."""
    from slipstream.train.launch.joined import find_job

    job = find_job(os.environ)
    if job is not None and job.world_size > 1:
        from slipstream.train.launch.leaving import leave

        leave(0)
