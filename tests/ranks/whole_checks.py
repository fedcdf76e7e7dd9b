"""What two real processes with FSDP2 do with whole models: `test_whole.py` starts them and reads what they print.

Tasks generate with the model in evaluations, and ask its average in updates, as often as their batches need: on each
rank another number of times.
"""

import json
import random
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenstep import Ema, Hook, Logging, Loss, MapData, Task, Trainer, Training
from evenstep.errors import EvenstepError
from evenstep.events import Evaluate, EvaluateBegin
from evenstep.parallel import Ddp, Fsdp, Group, Ordered, OrderedFsdp, Processes, Strategy, Zero1
from evenstep.parallel.reducer.fsdp import FsdpReducer

WORDS, END, DECAY = 6, 0, 0.8
CUTS = [(4, 1), (9, 9), (5, 2), (1, 1)]


class Writer(nn.Module):
    """Gives scores of the next word, and writes until it comes to the end, or to its sixth word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for one in self.parameters():
                one.uniform_(-1, 1, generator=generator)

    def hidden(self, words: Tensor) -> Tensor:
        points = self.words(words)
        for block in self.blocks:
            points = torch.tanh(block(points)) + points
        return self.norm(points) * self.scale

    def forward(self, words: Tensor) -> Tensor:
        return self.hidden(words) @ self.words.weight.T

    def write(self, word: int) -> list[int]:
        text = [word]
        while text[-1] != END and len(text) < 6:
            last = torch.tensor(text[-1:])
            # every second word without the whole model being called
            scores = self(last) if len(text) % 2 else self.hidden(last) @ self.words.weight.T
            text.append(int(scores.argmax()))
        return text


class Write(Task):
    """Trains on the next word, evaluates what is written."""

    def inputs(self, batch: Any) -> Tensor:
        return batch["word"]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output, batch["next"], reduction="sum")

    def evaluate(self, model: Any, batch: Any) -> Loss:
        assert type(model) is Writer and type(model.blocks[0]) is nn.Linear, "as the trainer was given it"
        assert not any(hasattr(one, "_is_fsdp_managed_module") for one in model.modules()), "libraries look for it"
        texts = [model.write(int(word)) for word in batch["word"]]
        return Loss(None, metrics={"words": (sum(map(sum, texts)), sum(map(len, texts)))})


class Taught(Write):
    """Asks the average for each second sample of its batch, one by one."""

    uses_average = True

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        total = super().loss(output, batch)
        for place, word in enumerate(batch["word"]):
            if word % 2:
                total = total + ((output[place] - self.now.teacher(word[None])[0]) ** 2).sum()
        return total


def pairs(count: int) -> list[dict[str, Tensor]]:
    return [{"word": torch.tensor(n % WORDS), "next": torch.tensor((n * n + 1) % WORDS)} for n in range(count)]


def trainer(strategy: Strategy, task: Task, cut: tuple[int, int] = (4, 1), **more: Any) -> Trainer:
    model = more.pop("model", None) or Writer()
    more.setdefault("evaluations", MapData(pairs(9), global_batch_size=cut[0], micro_batch_size=cut[1], shuffle=False))
    return Trainer(
        model=model,
        task=task,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data=more.pop("data", None) or MapData(pairs(10), global_batch_size=6, micro_batch_size=2, shuffle=False),
        updates=4,
        device="cpu",
        strategy=strategy,
        log=Logging(writers=()),
        train=more.pop("train", None) or Training(ema=Ema(decay=DECAY, evaluated="both")),
        **more,
    )


def written(state: dict[str, Tensor]) -> float:
    """The metric of all samples, by a plain model."""
    model = Writer()
    model.load_state_dict(state)
    model.eval()
    texts = [model.write(int(one["word"])) for one in pairs(9)]
    return sum(map(sum, texts)) / sum(map(len, texts))


def kinds(group: Group) -> Sequence[Strategy]:
    return Fsdp(group), OrderedFsdp(group), Fsdp(group, shard_ranks=1), OrderedFsdp(group, shard_ranks=1)


def what_is_generated_on_shards_is_that_of_a_plain_model_for_every_cut(group: Group) -> object:
    wrong: list[Any] = []
    for cut, strategy in zip(CUTS, kinds(group), strict=True):
        one = trainer(strategy, Write(), cut)
        found, state = one.train().metrics, one.state_dict()
        wanted = {"valid/words": written(state["ema"]), "valid/parameters/words": written(state["model"])}
        if any(found[name] != value for name, value in wanted.items()):
            wrong.append([cut, wanted, {name: found[name] for name in wanted}])
    return wrong


class Drawn(Task):
    """Draws what it makes of a batch from all generators, undoes it, and notes what it is told and has seen."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.seen: dict[tuple[int, bool, int], list[Any]] = {}

    def _note(self, event: Any) -> None:
        self.told.append((type(event).__name__, self.now.update))

    before_train = after_train = before_epoch = after_epoch = before_update = after_update = _note
    before_evaluate = after_evaluate = before_step = _note

    def transform(self, batch: Any) -> Any:
        shift = int(torch.randint(WORDS, ())) + int(np.random.randint(WORDS)) + random.randrange(WORDS)
        if not self.now.is_training:
            shift = 1
        self.seen[self.now.update, self.now.is_training, int(batch["number"][0])] = [shift, batch["word"].tolist()]
        return {**batch, "word": (batch["word"] + shift) % WORDS, "shift": shift}

    def inputs(self, batch: Any) -> Tensor:
        return batch["word"]

    def weight(self, batch: Any) -> Tensor:
        return (1 + batch["word"]).sum()

    def postprocess(self, output: Tensor, batch: Any) -> Tensor:
        return output.roll(-batch["shift"], dims=-1) * (1 + self.now.update)

    def loss(self, output: Tensor, batch: Any) -> Loss:
        losses = nn.functional.cross_entropy(output, batch["next"], reduction="none")
        right = (output.argmax(-1) == batch["next"]).sum()
        return Loss(
            (losses * (1 + (batch["word"] - batch["shift"]) % WORDS)).sum(), metrics={"right": (right, len(losses))}
        )

    def predict(self, output: Tensor, batch: Any) -> Tensor:
        return output.roll(-batch["shift"], dims=-1).argmax(-1)


def what_tasks_make_of_batches_and_outputs_is_that_of_one_process(group: Group) -> object:
    """Their transforms, weights, postprocessing, predictions, and what they are told, with every strategy."""
    numbered = [{**one, "number": torch.tensor(n)} for n, one in enumerate(pairs(14))]
    data = {"global_batch_size": 6, "micro_batch_size": 2}

    def run(strategy: Strategy) -> tuple[Any, ...]:
        task, model = Drawn(), Writer()
        model.norm = nn.Identity()  # its running statistics are means over ranks
        one = trainer(
            strategy,
            task,
            model=model,
            data=MapData(numbered, **data),
            evaluations=MapData(numbered[:9], **data, shuffle=False),
            hooks=[Evaluate(every_updates=2)],
            train=Training(check_loss=False),
        )
        metrics = one.train().metrics
        kept = {name: value for name, value in metrics.items() if not name.startswith(("perf/", "progress/"))}
        told, seen = list(task.told), dict(task.seen)
        predicted = [each.output for each in one.predict(MapData(numbered[:7], **data, shuffle=False))]
        state = one.state_dict()["model"]
        return kept, [state[name] for name in sorted(state)], predicted, told, seen

    wanted, said = run(Ordered()), []
    for strategy in (Ordered(group), Zero1(Ordered(group)), OrderedFsdp(group)):
        kept, state, predicted, told, seen = run(strategy)
        everybody = {key: value for part in group.gather(seen) for key, value in part.items()}
        kept, state, predicted = group.gather((kept, state, predicted))[0]
        said.append(
            [
                kept == wanted[0],
                all(torch.equal(one, other) for one, other in zip(state, wanted[1], strict=True)),
                all(torch.equal(one, other) for one, other in zip(predicted, wanted[2], strict=True)),
                told == wanted[3],
                # a rank with fewer micro-batches than others has more passes with shards, which count nowhere
                everybody == wanted[4] or isinstance(strategy, OrderedFsdp),
            ]
        )
    return said


def evaluations_between_updates_change_no_bit(group: Group) -> object:
    straight, seen = (trainer(OrderedFsdp(group), Write(), hooks=hooks) for hooks in ([], [Evaluate(every_updates=1)]))
    alone = trainer(Ordered(), Write(), hooks=[Evaluate(every_updates=1)])
    for one in (straight, seen, alone):
        one.train()
    metrics = [[record.value for record in one.storage.history("valid/words")] for one in (seen, alone)]
    return [same(straight, seen), same(straight, alone, without="norm.r"), len(metrics[0]), metrics[0] == metrics[1]]


def a_rank_that_runs_out_of_memory_generates_in_parts(group: Group) -> object:
    class Small(Write):
        def evaluate(self, model: Any, batch: Any) -> Loss:
            if group.rank == 1 and len(batch["word"]) > 1:
                model.write(int(batch["word"][0]))
                raise MemoryError("a wish")
            return super().evaluate(model, batch)

    one = trainer(Fsdp(group), Small(), (9, 3))
    found, state = one.train().metrics, one.state_dict()
    return [found["valid/words"] == written(state["ema"]), "valid/parameters/words" in found]


def a_rank_without_memory_for_the_whole_model_says_so(group: Group) -> object:
    class Short(Hook):
        def before_evaluate(self, event: EvaluateBegin) -> None:
            (reducer,) = one._loop.engine.reducers._all
            if group.rank == 1 and isinstance(reducer, FsdpReducer):
                reducer._parts = lambda: [SimpleNamespace(unshard=out_of_memory)]

    one = trainer(Fsdp(group), Write(), hooks=[Short()])
    try:
        one.train()
    except EvenstepError as error:
        return "rank 1 has no memory for the whole model" in str(error)
    return False


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("a wish")


def a_mean_teacher_of_shards_has_the_bits_of_one_process(group: Group) -> object:
    found: list[Any] = []
    for shards in (None, 1):
        ordered = trainer(OrderedFsdp(group, shard_ranks=shards), Taught(), train=without_statistics())
        alone = trainer(Ordered(), Taught(), train=without_statistics())
        fast = trainer(Fsdp(group, shard_ranks=shards), Taught(), train=without_statistics())
        for one in (ordered, alone, fast):
            one.train()
        found.append([same(ordered, alone), near(fast, alone) < 1e-12])
    return found


def a_teacher_is_asked_in_predictions_and_nowhere_outside(group: Group) -> object:
    class Predicts(Taught):
        def predict(self, output: Tensor, batch: Any) -> Tensor:
            return self.now.teacher(self.inputs(batch)) - output

    task = Predicts()
    one = trainer(Fsdp(group), task, train=Training(ema=Ema(decay=DECAY, evaluated="average")))
    kept = one.predict(MapData(pairs(3), global_batch_size=3, micro_batch_size=1, shuffle=False), collect=True)
    try:
        task.now.teacher(torch.tensor([1]))
    except EvenstepError as error:
        return [[float(each.output.abs().max()) for each in kept], "outside of an update's" in str(error)]
    return False


def the_teacher_of_the_first_update_gives_what_the_model_gives(group: Group) -> object:
    """In every format, since the average begins as a copy of the parameters."""
    found: list[Any] = []

    class Compares(Write):
        uses_average = True

        def loss(self, output: Tensor, batch: Any) -> Tensor:
            if self.now.update == 1 and self.now.is_training:
                found.append(torch.equal(self.now.teacher(self.inputs(batch)), output.detach()))
            return super().loss(output, batch)

    for make in (lambda: Fsdp(group), lambda: Zero1(Ddp(group))):
        for precision in ("32-true", "bf16-mixed", "bf16-true"):
            model = Writer().float()
            model.norm = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
            Trainer(
                model=model,
                task=Compares(),
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                data=MapData(pairs(8), global_batch_size=8, micro_batch_size=2, shuffle=False),
                updates=2,
                device="cpu",
                precision=precision,
                strategy=make(),
                log=Logging(writers=()),
                train=Training(ema=Ema(decay=DECAY)),
            ).train()
    return [len(found), all(found)]


def without_statistics() -> Training:
    return Training(ema=Ema(decay=DECAY), norm_statistics="frozen")


def same(one: Trainer, other: Trainer, without: str = "\0") -> bool:
    a, b = one.state_dict(), other.state_dict()
    return all(
        torch.equal(a[part][name], b[part][name])
        for part in ("model", "ema")
        for name in b[part]
        if without not in name
    )


def near(one: Trainer, other: Trainer) -> float:
    a, b = one.state_dict()["model"], other.state_dict()["model"]
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in b)


def main() -> None:
    torch.set_num_threads(1)
    group = Processes(torch.device("cpu"), timeout_s=60)
    checks: dict[str, Callable[[Group], object]] = globals()
    found = {name: checks[name](group) for name in sys.argv[2:]}  # the first is a folder, which nothing here needs
    if group.rank == 0:
        print(json.dumps(found))
    group.close()


if __name__ == "__main__":
    main()
