"""An agent that tunes a small network by tools: what it trains with a store, and what without.

    python -m bench.bench_agents [--quick] [--num 100] [--branches 30]

A scripted agent makes 100 proposals for a network on handwritten digits: new configurations,
repeats, near-repeats that share a beginning, and longer trainings of what it has looked at. For
each, it asks ``cost``, calls ``run`` and waits for ``job``, through a client of the official SDK
and ``thrifty mcp`` over standard input and output. Without a store, each proposal would train all
of its epochs. At the end, some results are compared with trainings alone, in another database.

Then, random branches of trials are trained, and each alone.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from mcp import Client
from mcp.client.stdio import StdioServerParameters

from bench.agents.branches import random_branches
from bench.agents.proposals import WHOLE, Proposal, proposals
from bench.common.harness import Goal, equal, finish, parser, table
from thrifty.space._coordinates import read_config
from thrifty.study import Study


STUDY = Path(__file__).with_name("agents") / "study.py"
NUM_COMPARED = 10


class Session:
    """Calls of tools, with their number, time and size."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.calls: dict[str, list[tuple[float, int]]] = defaultdict(list)

    async def ask(self, tool: str, **options: Any) -> Any:
        """Call a tool and return its answer."""
        began = time.perf_counter()
        found = await self._client.call_tool(tool, options)
        if found.is_error:
            raise RuntimeError(found.content[0].text)  # type: ignore[union-attr]
        answer = found.structured_content
        size = len(json.dumps(answer))
        self.calls[tool].append((time.perf_counter() - began, size))
        return answer


async def tune(folder: Path, asked: Sequence[Proposal]) -> dict[str, Any]:
    """Propose configurations one after the other; return the figures and all values."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "thrifty.cli", "mcp", str(STUDY), "--allow-run", "--max-epochs", "100000"],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
    )
    trained: Counter[str] = Counter()
    one_by_one: Counter[str] = Counter()
    wrong_costs, values = 0, []
    async with Client(server) as client:
        session = Session(client)
        used = 0
        for proposal in asked:
            options = {"study": "digits", "configs": [proposal.config()], "epochs": proposal.epochs}
            cost = await session.ask("cost", **options)
            job = await session.ask("run", **options)
            while job["state"] == "running":
                job = await session.ask("job", job=job["job"], wait_s=55)
            if job["state"] != "done":
                raise RuntimeError(f"{proposal}: {job}")
            values.append(job["result"]["trials"][0]["value"])
            now = job["budget"]["used_epochs"]
            wrong_costs += now - used != cost["epochs_to_train"]
            trained[proposal.kind] += now - used
            one_by_one[proposal.kind] += proposal.epochs
            used = now
    return {
        "trained": dict(trained),
        "one by one": dict(one_by_one),
        "wrong costs": wrong_costs,
        "values": values,
        "calls": {tool: len(found) for tool, found in session.calls.items()},
        "bytes": {tool: sum(size for _, size in found) for tool, found in session.calls.items()},
        "seconds": {tool: median(s for s, _ in found) for tool, found in session.calls.items()},
    }


def alone(proposal: Proposal, folder: Path) -> float | None:
    """Return the value of a proposal that is trained alone, in a database of its own."""
    spec = importlib.util.spec_from_file_location("study_of_bench_agents", STUDY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    study: Study = module.study
    study.storage = replace(study.storage, url=f"sqlite:///{folder}/alone.db")
    found = study.only([read_config(proposal.config())], epochs=proposal.epochs)
    return found.run(progress=False).trials[0].value


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--num", type=int, default=100, help="proposals")
    options.add_argument("--branches", type=int, default=30, help="branches")
    args = options.parse_args()
    asked = list(proposals(6 if args.quick else args.num))
    with tempfile.TemporaryDirectory() as place:
        found = asyncio.run(tune(Path(place), asked))
    compared = [n for n, each in enumerate(asked) if each.kind != "new"][
        :: max(1, len(asked) // 25)
    ]
    compared = compared[:NUM_COMPARED]
    same = 0
    for number in compared:
        with tempfile.TemporaryDirectory() as place:
            same += alone(asked[number], Path(place)) == found["values"][number]
    goals = report(found, asked, compared=len(compared), same=same)
    print("\nrandom branches\n")
    rows, more = random_branches(3 if args.quick else args.branches)
    finish("agents", {**found, "compared": len(compared), "branches": rows}, [*goals, *more])


def report(
    found: dict[str, Any], asked: Sequence[Proposal], *, compared: int, same: int
) -> list[Goal]:
    """Print tables, and return the goals."""
    counts = Counter(each.kind for each in asked)
    rows = [
        {
            "proposals": kind,
            "number": counts[kind],
            "epochs one by one": found["one by one"][kind],
            "epochs trained": found["trained"][kind],
        }
        for kind in counts
    ]
    total, trained = sum(found["one by one"].values()), sum(found["trained"].values())
    rows.append({
        "proposals": "all",
        "number": len(asked),
        "epochs one by one": total,
        "epochs trained": trained,
    })
    table(rows)
    print(f"\n{total / max(trained, 1):.2f} times fewer epochs ({WHOLE} a whole training)\n")
    table([
        {
            "tool": tool,
            "calls a decision": num / len(asked),
            "bytes a decision": found["bytes"][tool] / len(asked),
            "median seconds": found["seconds"][tool],
        }
        for tool, num in found["calls"].items()
    ])
    found["factor"] = total / max(trained, 1)
    return [
        equal("proposals whose cost was not what they trained", found["wrong costs"], 0),
        equal("epochs trained for repeats", found["trained"].get("repeat", 0), 0),
        equal("values equal to those of training alone", same, compared),
    ]


if __name__ == "__main__":
    main()
