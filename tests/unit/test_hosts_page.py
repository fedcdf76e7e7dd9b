"""The Kubernetes job of the page on several machines is a job, and means our exit codes, all of them."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from evenstep import process
from evenstep.parallel.rank_info import rank_info_of

PAGE = Path(__file__).parents[2] / "docs/hosts.md"
CODES = {name: code for name, code in vars(process).items() if name.startswith("EXIT_")}


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    """What the page has, by kind."""
    found = re.search(r"```yaml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
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
