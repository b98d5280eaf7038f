"""What a plan says about sending a share of the elements: whether it pays, and where it could."""

from __future__ import annotations

from slipstream.cluster import Cluster
from slipstream.costs.formulas import break_even_density
from slipstream.plan.model import Plan
from slipstream.plan.sparsity import Sparsity
from slipstream.trace import Trace
from slipstream.words import counted, percent, size


def sparse_sentences(
    sparsity: Sparsity, plan: Plan, trace: Trace, cluster: Cluster
) -> tuple[str, ...]:
    """How much of what may be sent sparsely is, and below which density that pays.

    The break-even is by bytes between nodes alone: formula 2s / (m (s+4)) for m nodes and values of
    s bytes (`costs.formulas.break_even_density`).
    """
    way = f"{sparsity.wire.density:g} of the elements by {sparsity.collective}"
    may = [gradient for gradient in trace.gradients if sparsity.allows(gradient)]
    sparse = [bucket for bucket in plan.reduce if not isinstance(bucket.wire, str)]
    if not may:
        text = (
            f"No gradient may send {way}: each has fewer than {sparsity.small_numel:,} elements, "
            "another dtype, or a name that is to be sent in full."
        )
    elif not sparse:
        text = f"Sending {way} pays nowhere here: no plan that does so is faster."
    else:
        sent = sum(bucket.bytes for bucket in sparse)
        whole = sum(gradient.bytes for gradient in may)
        text = (
            f"{counted(len(sparse), 'bucket')} of {size(sent)} together send {way}; "
            f"{counted(len(may), 'gradient')} of {size(whole)} may."
        )
    if cluster.nodes == 1 or sparsity.collective != "hitopk":
        return (text,)
    share = percent(break_even_density(cluster, sparsity.values))
    return (
        text,
        f"By bytes between {cluster.nodes} nodes alone, hitopk with {sparsity.values} values pays "
        f"against a torus below a density of {share}; selecting, and links inside nodes, come on "
        "top.",
    )
