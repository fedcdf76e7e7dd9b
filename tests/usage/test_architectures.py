"""Architectures of transformers, hundreds of them: the same however they are cut and shared."""

from copy import deepcopy

import architectures_programs as programs
import pytest
from launched import Failed, on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400), pytest.mark.filterwarnings("ignore")]

AT_LEAST = {"CausalLM": 100, "Seq2SeqLM": 12, "SequenceClassification": 70, "ImageClassification": 8}
NORMS = ("mobilenet_v1", "mobilenet_v2", "mobilevit", "swiftformer")  # BatchNorm: ranks have means of its statistics
BY_THE_CUT = (*NORMS, "ibert")  # whose quantised layers follow the range of numbers from pass to pass
_OWN_CACHE = "The expanded size of the tensor (24)"  # they make one themselves, and join to it what is computed again
REFUSED = {"squeezebert": "torch.Tensor and DTensor", "xlm": _OWN_CACHE, "flaubert": _OWN_CACHE}
BIDIRECTIONAL = ("xlnet", "cpmant", "xlm")


@pytest.mark.parametrize("kind", programs.KINDS)
def test_every_architecture_is_the_same_however_it_is_cut(kind: str) -> None:
    tried, wrong = 0, list[str]()
    for name in programs.architectures(kind):
        if name in BY_THE_CUT or (kind == "CausalLM" and name in BIDIRECTIONAL):
            continue
        model = programs.built(kind, name)
        if model is None:
            continue
        tried += 1
        whole = programs.trained(kind, deepcopy(model), size=8)
        for size in (3, 1):
            far = programs.apart(whole, programs.trained(kind, deepcopy(model), size=size))
            if not far < 1e-5:
                wrong.append(f"{name} in micro-batches of {size}: {far:.1e}")
    assert tried >= AT_LEAST[kind] and not wrong, (tried, wrong)


@pytest.mark.parametrize("kind", programs.KINDS)
def test_every_architecture_has_the_bits_of_one_process_on_two_ranks(kind: str) -> None:
    left_out = NORMS + (BIDIRECTIONAL if kind == "CausalLM" else ())
    names = [one for one in programs.architectures(kind) if one not in left_out]
    every = [("ordered", "none"), ("ordered", "blocks")]
    shared = [("ordered-zero1", "none"), *every, ("ordered-fsdp", "none"), ("ordered-fsdp", "blocks")]
    taken = [one for one in names if one not in REFUSED]  # what is refused ends the ranks
    tried, wrong = 0, list[str]()
    for some in [*(taken[at : at + 8] for at in range(0, len(taken), 8)), *([one] for one in names if one in REFUSED)]:
        (alone,) = on_ranks(1, programs.on_strategies, kind, some, every, timeout_s=600)
        first, second = on_ranks(2, programs.on_strategies, kind, some, shared, timeout_s=600)
        assert not any(isinstance(one, Failed) for one in (alone, first, second)), (alone, first, second)
        assert first == second and first.keys() == alone.keys(), (first, alone)
        for name, ways in first.items():
            tried += 1
            ends = {*ways.values(), *alone[name].values()}
            ends = {one for one in ends if "has none: no" not in one}  # blocks
            refused = {one for one in ends if REFUSED.get(name, "?") in one}
            if len(ends - refused) != 1 or (name in REFUSED) != bool(refused):
                wrong.append(f"{name}: {ways} and {alone[name]}")
    assert tried >= AT_LEAST[kind] and not wrong, (tried, wrong)
