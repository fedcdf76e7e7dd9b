"""The other trainers, in a virtual environment of their own, `.venv-peers`, beside evenstep and the same torch.

Versions are pinned by constraints.txt and benchmarks/peers-constraints.txt. What cannot be installed is skipped, and
said. Delete the folder to have it made again.
"""

import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-peers"
CONSTRAINTS = (ROOT / "constraints.txt", ROOT / "benchmarks" / "peers-constraints.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another trainer.

    Args:
        package: as pip knows it.
        module: what it is imported as.
        contender: the file in contenders/ that trains with it.
        alone: whether it needs a process without the other peers.
    """

    package: str
    module: str
    contender: str
    alone: bool = False


PEERS = (
    Peer(package="pytorch-ignite", module="ignite", contender="ignite_"),
    Peer(package="accelerate", module="accelerate", contender="accelerate_"),
    Peer(package="lightning", module="lightning", contender="lightning_"),
    # It sets Accelerate's number of accumulation steps, which a process has only one of.
    Peer(package="transformers", module="transformers", contender="transformers_", alone=True),
)


def python() -> Path:
    """A Python that has evenstep, and the peers if they can be had; makes the environment the first time."""
    made, stamp = VENV / "bin" / "python", VENV / ".ready"
    key = _key()
    if stamp.exists() and stamp.read_text() == key:
        return made
    print(f"installing other trainers into {VENV.name}, once …", flush=True)
    trouble = _run(sys.executable, "-m", "venv", str(VENV)) or _install("-e", str(ROOT))
    if trouble:
        print(f"all other trainers are skipped, {VENV.name} could not be made: {trouble}")
        return Path(sys.executable)
    for peer in PEERS:
        trouble = _install(peer.package)
        if trouble:
            print(f"{peer.package} is skipped: {trouble}")
    stamp.write_text(key)
    return made


def _key() -> str:
    parts = [path.read_bytes() for path in (*CONSTRAINTS, ROOT / "pyproject.toml")]
    return sha256(b"\0".join([*parts, sys.version.encode()])).hexdigest()


def _install(*what: str) -> str:
    """Install without changing torch; gives what went wrong, or ""."""
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = [part for path in CONSTRAINTS for part in ("-c", str(path))]
    return _run(*pip, *constraints, f"torch=={version('torch').partition('+')[0]}", *what)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"{command[0]} exited with {done.returncode}"


if __name__ == "__main__":
    print(python())
