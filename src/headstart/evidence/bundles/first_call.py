"""Makes one first call and prints a `FirstCall`: a process of `headstart.evidence.bundles.waiting`.

Imports stand where their time is taken.
"""

from __future__ import annotations

import sys
import time


def main(call: str, device: str) -> None:
    """Time it."""
    began = time.perf_counter()
    import torch

    times = {"torch": time.perf_counter() - began}
    began = time.perf_counter()
    place = torch.device(device)
    _ = (torch.ones(64, 64, device=place) @ torch.ones(64, 64, device=place)).sum().item()
    times["start"] = time.perf_counter() - began
    began = time.perf_counter()
    import headstart

    _ = headstart.gated_delta_rule
    times["package"] = time.perf_counter() - began
    # What follows is no part of a server: inputs to call with.
    from headstart.evidence.bundles.records import FirstCall
    from headstart.evidence.bundles.waiting import prepared
    from headstart.evidence.timing import synchronize

    make = prepared(call, place)
    synchronize(place)
    with torch.inference_mode():
        for name in ("first", "second"):
            began = time.perf_counter()
            make()
            synchronize(place)
            times[name] = time.perf_counter() - began
    found = headstart.programs()
    told = {"call": call, "device": device, "python": sys.version.split()[0], **times}
    told |= {"loaded": found.loaded, "compiled": found.compiled}
    print(FirstCall.model_validate(told).model_dump_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
