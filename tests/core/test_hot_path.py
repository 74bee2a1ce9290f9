"""No hook is called per step, micro-batch or parameter: pluggy decides who, once, while planning."""

import pluggy

from trainforge.testing import tiny_run


def test_the_number_of_hook_calls_does_not_grow_with_the_steps(tmp_path, monkeypatch):
    calls = []
    call = pluggy._hooks.HookCaller.__call__

    def counting(self, **arguments):
        calls.append(self.name)
        return call(self, **arguments)

    monkeypatch.setattr(pluggy._hooks.HookCaller, "__call__", counting)
    counts = []
    for steps in (1, 6):
        calls.clear()
        plugins = ["resident", "adamw", "jsonl"]
        tiny_run(tmp_path / str(steps), plugins=plugins, train={"steps": steps, "log_every": 1})
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0
