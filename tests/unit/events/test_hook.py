import weakref

from evenstep.errors import HookError
from evenstep.events import Bus, Hook
from refused import refused


def test_a_hook_without_trainer_says_so() -> None:
    with refused(HookError, "Hook"):
        _ = Hook().trainer


def test_neither_hooks_nor_bus_keep_the_trainer_alive() -> None:
    class Short:
        bus: Bus

    hook, trainer = Hook(), Short()
    trainer.bus = Bus([hook], trainer)  # type: ignore[arg-type]
    gone = weakref.ref(trainer)
    del trainer
    assert gone() is None
    with refused(HookError, "Hook"):
        _ = hook.trainer


def test_a_hook_has_no_state_and_keeps_no_checkpoint_by_default() -> None:
    hook = Hook()
    assert hook.state_dict() == {}
    assert hook.kept_checkpoints() == ()
