"""The study whose configurations the agent proposes; ``thrifty mcp`` loads this file."""

import thrifty as th
from bench.common.digits_task import Digits


study = th.Study(
    Digits(),
    th.Space(
        lr=th.Step(th.Float(0.005, 0.3, log=True), [th.Int(3, 19)], gamma=th.Choice([0.1, 0.3]))
    ),
    algorithm=th.Hyperband(max_epochs=20),
    metric="accuracy",
    storage="sqlite:///agent.db",
    name="digits",
)
