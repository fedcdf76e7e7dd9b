"""What users may rely on: public names, the README's snippet, words of other trainers, links, keys in messages."""

import ast
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import links
import pytest
import torch
import yaml
from torch import Tensor, nn

import evenstep
from evenstep import Logging, MapData, Statistics, Task, Trainer, process
from evenstep.config.load import all_keys
from evenstep.errors import ArgumentError
from evenstep.events import WRITERS
from evenstep.parallel.rank_info import rank_info_of
from evenstep.train.timing import PHASES
from evenstep.usual_words import ARGUMENTS, KEYS
from refused import refused

ROOT = Path(__file__).parents[2]


def test_a_star_import_overwrites_no_variable_of_a_script() -> None:
    names: dict[str, object] = {"data": 1, "train": 2, "events": 3, "Image": 4}
    exec("from evenstep import *", names)
    assert (names["data"], names["train"], names["events"], names["Image"]) == (1, 2, 3, 4)
    assert names["Trainer"] is evenstep.Trainer


def test_the_snippet_in_the_readme_trains() -> None:
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(snippets) == 1
    names: dict[str, object] = {}
    exec(compile(snippets[0], "README.md", "exec"), names)
    trainer = names["trainer"]
    assert isinstance(trainer, evenstep.Trainer)
    assert trainer.progress.update == 200


def test_each_word_has_a_key_that_exists() -> None:
    known = {*all_keys(), "resume"}
    assert {key for key in KEYS.values() if key not in known and not key.startswith("optimizer.args.")} == set()


def test_each_word_has_an_argument_that_exists() -> None:
    known = {*inspect.signature(evenstep.Trainer).parameters, "trainer"}
    assert {re.split(r"\W", text)[0] for text in ARGUMENTS.values()} <= known


def test_trainer_refuses_unknown_arguments() -> None:
    trainer: Any = evenstep.Trainer
    with refused(ArgumentError, "max_epochs"):
        trainer(model=None, task=None, optimizer=None, data=None, max_epochs=3)


def test_package_names_our_class_for_a_usual_one() -> None:
    with pytest.raises(AttributeError, match=r"evenstep\.EarlyStop"):
        _ = evenstep.EarlyStopping  # pyright: ignore[reportAttributeAccessIssue]


def test_every_local_link_of_the_pages_leads_somewhere() -> None:
    assert links.broken(ROOT) == []


def test_the_page_on_installing_names_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "install.md").read_text()
    assert [extra for extra in project["optional-dependencies"] if f"`{extra}`" not in page] == []


SOURCE = Path(__file__).parents[2] / "src" / "evenstep"


def test_what_messages_say_to_write_in_a_run_file_are_keys_of_run_files() -> None:
    said = {
        key
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for key in re.findall(r"in a run\s+file,? `([a-z_]+\.[a-z_.]+)", node.value)
    }
    assert said and said <= set(all_keys())


def test_a_trainer_takes_few_arguments() -> None:
    assert len({*inspect.signature(evenstep.Trainer).parameters} - {"unknown"}) <= 20


PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
NAMES = [name for row in re.findall(r"^\| (`[^|]*?) \|", PAGE, re.M) for name in re.findall(r"`([^`]+)`", row)]


class Squares(Task):
    unit = "tokens"

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def is_named(metric: str) -> bool:
    patterns = (re.sub(r"NAME|METRIC|TASK|GROUP|LAYER|(?<=/)i$", r"[\\w.]+", name) for name in NAMES)
    return any(re.fullmatch(pattern, metric) for pattern in patterns)


def test_every_metric_of_a_run_is_in_the_table(tmp_path: Path) -> None:
    pairs = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(8)]
    model = nn.Sequential(nn.Linear(1, 1))
    trainer = Trainer(
        model=model,
        task=Squares(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        data=MapData(pairs, global_batch_size=4),
        evaluations=MapData(pairs, global_batch_size=8, shuffle=False),
        updates=4,
        device="cpu",
        folder=tmp_path,
        hooks=[Statistics(every_updates=2, update_ratio=True, gradient_norms=True)],
        log=Logging(writers=("jsonl",), every_updates=2),
    )
    trainer.train()
    unnamed = {name for name in trainer.storage.names() if not is_named(name)} - {f"perf/{phase}_s" for phase in PHASES}
    assert not [name for name in unnamed if not name.startswith("perf/memory_")]
    assert {"progress/tokens", "perf/forward_s"} <= set(trainer.storage.names())


@pytest.mark.parametrize("name", [*PHASES, *WRITERS])
def test_every_phase_and_every_writer_is_named(name: str) -> None:
    assert name in NAMES


HOSTS_PAGE = Path(__file__).parents[2] / "docs/hosts.md"
CODES = {name: code for name, code in vars(process).items() if name.startswith("EXIT_")}


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    """What the page has, by kind."""
    found = re.search(r"```yaml\n(.*?)```", HOSTS_PAGE.read_text(), flags=re.DOTALL)
    assert found is not None
    return {document["kind"]: document for document in yaml.safe_load_all(found[1])}


@pytest.fixture
def job(documents: dict[str, Any]) -> Any:
    return documents["Job"]["spec"]


@pytest.fixture
def container(job: Any) -> Any:
    (one,) = job["template"]["spec"]["containers"]
    return one


def test_each_exit_code_but_success_has_its_rule(job: Any, container: Any) -> None:
    rules = [rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert {rule["onExitCodes"]["containerName"] for rule in rules} == {container["name"]}
    assert {rule["onExitCodes"]["operator"] for rule in rules} == {"In"}
    meant = {code: rule["action"] for rule in rules for code in rule["onExitCodes"]["values"]}
    assert sum(len(rule["onExitCodes"]["values"]) for rule in rules) == len(meant), "one rule for each code"
    assert meant == {
        CODES["EXIT_ERROR"]: "Count",
        CODES["EXIT_CONFIG"]: "FailJob",
        CODES["EXIT_REQUEUE"]: "Ignore",
        CODES["EXIT_INTERRUPTED"]: "FailJob",
    }
    assert {*meant, process.EXIT_DONE} == set(CODES.values())
    assert job["template"]["spec"]["restartPolicy"] == "Never", "which these rules ask for"


def test_the_pods_are_the_ranks_of_one_run(documents: dict[str, Any], job: Any, container: Any) -> None:
    service, name, pod = documents["Service"], documents["Job"]["metadata"]["name"], job["template"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    given = {one["name"]: one.get("value") for one in container["env"]}
    assert given["RANK"] is None  # by the pod
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"]
    for index in range(job["completions"]):
        place = rank_info_of(given | {"RANK": str(index)})
        assert place is not None
        assert (place.rank, place.ranks) == (index, job["completions"])
        assert place.address == f"{name}-0.{service['metadata']['name']}"  # as Kubernetes names the pods of such a job
    mounted = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert {one["name"] for one in pod["spec"]["volumes"]} == mounted.keys()
