"""MG-WFBP's published figures beside ours from the same inputs: docs/reproduction/mg-wfbp.md.

Ring constants, golden cases of the greedy rule, an independent simulation, measured iterations on
16 and 32 workers and on 8 nodes, gains on 64 nodes, and what the published compute times mean in
FLOPs. Everything is planned and simulated by the library on the shipped traces; what was published
stands in mgwfbp_published.py. Nothing is timed here, so the same code gives the same tables; the
last part shows what the lab measured, where that was stored:

    python benchmarks/lab_plans.py --paper | tail -n 1 > benchmarks/results/lab_plans_paper.json

Without options the generated parts of the document are renewed. --check compares them instead:
exit code 1 where one differs. --quick leaves the document alone and counts no FLOPs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import mgwfbp_sections as sections
from harness import Figure, finish, options
from markers import markdown_table, renewed
from mgwfbp_lab import lab_run
from mgwfbp_sections import Section

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "reproduction" / "mg-wfbp.md"
LAB_RESULT = HERE / "results" / "lab_plans_paper.json"
SIMULATED: dict[str, Callable[[], Section]] = {
    "ring": sections.ring_constants,
    "golden": sections.golden,
    "independent": sections.independent,
    "shipped": sections.shipped_constants,
    "calibrated": sections.calibrated,
    "survey": sections.survey,
    "k80": sections.k80_nodes,
    "sixty-four": sections.sixty_four_nodes,
}
COUNTED = ("inception_v4", "resnet152", "bert_base", "resnet50", "densenet201", "googlenet")


def rates() -> Section:
    """What the published compute times mean in FLOP/s; loads torch."""
    from generate_traces import ARCHITECTURES, record

    rows = []
    for name in COUNTED:
        architecture = ARCHITECTURES[name]
        flops = record(architecture)[1].flops
        seconds = architecture.compute_seconds
        rows.append(
            [
                name,
                str(architecture.batch_size),
                f"{flops / 1e12:.2f}",
                f"{seconds:.3f} s",
                f"{flops / seconds / 1e12:.1f}",
            ]
        )
    head = ["model", "batch", "TFLOP a step", "published compute", "TFLOP/s"]
    value = f"{rows[0][-1]} TFLOP/s"
    return Section(
        markdown_table(head, rows), [Figure("Inception-v4's published time means", value)]
    )


def differing(document: str, parts: dict[str, Section]) -> list[str]:
    """The names of the parts that the document does not hold as they are now."""
    return [name for name, part in parts.items() if renewed(document, name, part.text) != document]


def main() -> int:
    """Renews or compares the document and prints the figures."""
    parser = options(__doc__)
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    parser.add_argument(
        "--lab", type=Path, default=LAB_RESULT, help="the last line of `lab_plans.py --paper`"
    )
    arguments = parser.parse_args()
    parts = {name: generate() for name, generate in SIMULATED.items()}
    if not arguments.quick:
        parts["rates"] = rates()
    parts["lab"] = lab_run(arguments.lab)
    document = DOCUMENT.read_text(encoding="utf-8")
    stale = differing(document, parts)
    if arguments.check and stale:
        print(
            f"{DOCUMENT.name}: {', '.join(stale)} differ from what the code gives", file=sys.stderr
        )
    elif not arguments.quick:
        for name, part in parts.items():
            document = renewed(document, name, part.text)
        DOCUMENT.write_text(document, encoding="utf-8")
    figures = [figure for part in parts.values() for figure in part.figures]
    ratios = {name: ratio for part in parts.values() for name, ratio in part.ratios.items()}
    finish("reproduce_mgwfbp", figures, ratios, quick=arguments.quick, stale=stale)
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
