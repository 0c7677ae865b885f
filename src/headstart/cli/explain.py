"""`headstart explain CASE`: who would run a workload here, and why others would not."""

from __future__ import annotations

import click


@click.command()
@click.argument("case_id", metavar="CASE")
@click.option("--device", help="Where the tensors would lie; by default cuda if there is one.")
def command(case_id: str, device: str | None) -> None:
    """Print for each implementation whether it accepts CASE, and a sentence."""
    import torch

    import headstart
    from headstart.cli.printing import print_table
    from headstart.evidence import cases

    case = cases.get(case_id)
    if case.op == "model":
        raise ValueError(
            f"case: {case.id} is a whole model; its operations have cases of their own"
        )
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: {device}: {str(error).splitlines()[0]}") from error
    rows = headstart.explain(case.op, **case.blank(place))
    print_table(("implementation", "accepted", "sentence"), rows)
