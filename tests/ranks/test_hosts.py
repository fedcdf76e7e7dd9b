"""Two hosts for real: network namespaces joined by a cable, each with a torchrun agent and two ranks.

They meet, train, and one host is lost: its processes are killed and the cable is pulled, so nobody says goodbye. The
other goes on alone from the newest checkpoint and ends at the bits of a run that nothing happened to. Needs the right
to make network namespaces, and `ip` (iproute2).
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch
from scripts import Script
from squares import write_run

pytestmark = pytest.mark.slow  # each starts eight processes and waits for timeouts

UPDATES = 60
MORE = """
data.train.args.count = 44
checkpoint.every_updates = 3
parallel.timeout_s = 8
"""
TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace with one end of the cable."""

    namespace: str
    address: str
    link: str

    def start(self, *command: object, **environ: str) -> subprocess.Popen[str]:
        """Run a Python module on this host."""
        given = ["ip", "netns", "exec", self.namespace, sys.executable, "-m", *map(str, command)]
        return subprocess.Popen(
            given,
            env=os.environ | {"GLOO_SOCKET_IFNAME": self.link, "OMP_NUM_THREADS": "1"} | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pull_cable(self) -> None:
        ip("-n", self.namespace, "link", "set", self.link, "down")

    def lose(self) -> None:
        """Pull the cable, then end all that runs here, without a word to anyone."""
        self.pull_cable()
        self.kill()

    def kill(self) -> None:
        for process in ip("netns", "pids", self.namespace).split():
            subprocess.run(["kill", "-9", process], check=False, capture_output=True)


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20).stdout


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here (iproute2), to make two hosts with")
    name = f"even{os.getpid()}"
    # 198.18.0.0/15 is set aside for tests of networks
    pair = Host(f"{name}a", "198.18.77.1", f"{name}a"[-15:]), Host(f"{name}b", "198.18.77.2", f"{name}b"[-15:])
    made: list[Host] = []
    try:
        for host in pair:
            done = subprocess.run(["ip", "netns", "add", host.namespace], capture_output=True, text=True, timeout=20)
            if done.returncode:
                pytest.skip(f"two hosts cannot be made here: {done.stderr.strip()}")
            made.append(host)
        ends = [("name", host.link, "netns", host.namespace) for host in pair]
        try:
            ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"two hosts cannot be joined here: {error.stderr.strip()}")
        for host in pair:
            names = Path("/etc/netns", host.namespace)  # what is in it hides the files of /etc from this host
            names.mkdir(parents=True)
            lines = [f"{each.address} {each.namespace}" for each in pair]
            (names / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
            (names / "resolv.conf").write_text("")  # nobody out there would answer, after 10 s
            ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.link)
            for link in ("lo", host.link):
                ip("-n", host.namespace, "link", "set", link, "up")
        yield pair
    finally:
        for host in made:
            host.kill()
            ip("netns", "delete", host.namespace)
            shutil.rmtree(Path("/etc/netns", host.namespace), ignore_errors=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, out, err


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / f"checkpoints/step-{UPDATES:08d}/model.safetensors")


def test_a_run_on_two_hosts_outlives_one_of_them_bit_by_bit(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    file = write_run(tmp_path, updates=UPDATES, more=MORE)
    undisturbed = Script("-m", "evenstep", "train", file, "--runs", tmp_path / "undisturbed").ended(TIMEOUT_S)
    assert undisturbed.code == 0, undisturbed

    first, second = hosts
    meet = ["--nnodes=2", "--nproc-per-node=2", f"--master-addr={first.address}", "--master-port=29511"]
    train = ["-m", "evenstep", "train", file, "--runs", tmp_path, "--task.args.slow_s", "0.1"]
    agents = [
        host.start("torch.distributed.run", *meet, f"--node-rank={rank}", *train) for rank, host in enumerate(hosts)
    ]
    folder = tmp_path / "run"
    waited = time.monotonic()
    while len(list(folder.glob("checkpoints/step-*"))) < 2 and time.monotonic() - waited < TIMEOUT_S:
        assert [agent.poll() for agent in agents] == [None, None], [ended(agent) for agent in agents]
        time.sleep(0.05)
    second.lose()
    lost = time.monotonic()
    code, _, err = ended(agents[0])
    assert code == 1
    assert time.monotonic() - lost < 60  # of which 8 s are the configured wait
    assert "evenstep: rank 0 of 4 could not" in err or "evenstep: rank 1 of 4 could not" in err, err
    assert ended(agents[1])[0] != 0
    saved = (folder / "latest").read_text().strip()
    assert "step-00000000" < saved < f"step-{UPDATES:08d}"

    alone = ["--nnodes=1", "--nproc-per-node=2", f"--master-addr={first.address}", "--master-port=29512"]
    code, out, err = ended(
        first.start("torch.distributed.run", *alone, "-m", "evenstep", "train", *train[3:-2], "--resume", "auto")
    )
    assert code == 0, (out, err)
    assert saved in out  # where it went on from
    wanted, got = parameters(tmp_path / "undisturbed/run"), parameters(folder)
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)


def test_both_sides_of_a_network_that_is_cut_stop_within_the_timeout(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    file = write_run(tmp_path, updates=UPDATES, more=MORE)
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29513"}
    train = ["evenstep", "train", file, "--runs", tmp_path, "--task.args.slow_s", "0.1"]
    ranks = [host.start(*train, RANK=str(rank), **meet) for rank, host in enumerate(hosts)]
    folder = tmp_path / "run"
    waited = time.monotonic()
    while len(list(folder.glob("checkpoints/step-*"))) < 2 and time.monotonic() - waited < TIMEOUT_S:
        assert [rank.poll() for rank in ranks] == [None, None], [ended(rank) for rank in ranks]
        time.sleep(0.05)
    hosts[1].pull_cable()
    cut = time.monotonic()
    said = [ended(rank) for rank in ranks]
    assert time.monotonic() - cut < 60  # of which 8 s are the configured wait
    assert [code for code, _, _ in said] == [1, 1]
    assert "rank 1 did not come within 8 s" in said[0][2]
    assert "rank 0, through which ranks find each other, is gone or frozen" in said[1][2]
    saved = (folder / "latest").read_text().strip()
    assert "step-00000000" < saved < f"step-{UPDATES:08d}"
