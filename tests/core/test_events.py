import pluggy
import pytest

from trainforge.context import SilentConsole
from trainforge.errors import ProviderError
from trainforge.events import Events
from trainforge.hookspecs import hookimpl


class Recorder:
    def __init__(self, log, name):
        self.log, self.name = log, name

    @hookimpl
    def forge_step_ended(self, run, step):
        self.log.append((self.name, run, step))


class Broken:
    @hookimpl
    def forge_step_ended(self, step):
        raise ValueError(f"no disk at {step}")


def test_observers_are_told_in_the_order_in_which_they_were_chosen():
    log = []
    events = Events([("a", Recorder(log, "a")), ("b", Recorder(log, "b"))], SilentConsole())
    events.step_ended("the run", 3)
    assert log == [("a", "the run", 3), ("b", "the run", 3)]


def test_a_failing_observer_is_named_once_and_muted_and_the_others_go_on():
    log, console = [], SilentConsole()
    events = Events([("broken", Broken()), ("b", Recorder(log, "b"))], console)
    events.step_ended("run", 1)
    events.step_ended("run", 2)
    assert [step for _, _, step in log] == [1, 2]
    assert len(console.lines) == 1
    assert "broken (observer)" in console.lines[0]
    assert "no disk at 1" in console.lines[0]
    assert events.muted == {"broken"}


def test_strict_raises_with_the_plugins_name():
    events = Events([("broken", Broken())], SilentConsole(), strict=True)
    with pytest.raises(ProviderError, match=r"broken \(observer\) failed while handling forge_step_ended"):
        events.step_ended("run", 1)


def test_an_observer_may_take_fewer_arguments_but_not_others():
    class Wrong:
        @hookimpl
        def forge_step_ended(self, loss):
            pass

    with pytest.raises(pluggy.PluginValidationError, match="loss"):
        Events([("wrong", Wrong())], SilentConsole())
